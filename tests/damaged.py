"""Saved networks whose files somebody has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def header_of(path: Path) -> Iterator[dict[str, Any]]:
    """What a file says beside its arrays: to be changed in place, and written back."""
    with np.load(path) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["network"].tobytes())
    yield header
    arrays["network"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)
