"""What the tests of planning share."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import Machine

from autoconv.records.cache import TuningCache


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path, system=None)


@pytest.fixture
def machine() -> Machine:
    return Machine()
