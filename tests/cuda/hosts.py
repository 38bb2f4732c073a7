"""A GPU that is none: a CuPy of NumPy arrays, whose kernels run on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import edge, operands
from simt.fake_cupy import FakeCuPy, forget, install

from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning.reference import convolve, error, magnitude

LAYER = edge("plain", N=1, C=4, K=4)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuPy]:
    yield install(FakeCuPy(), monkeypatch)
    forget()


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path, system=None)


def given(cupy: FakeCuPy, layer: ConvLayer, gpu: int = 0) -> list[Any]:
    with cupy.cuda.Device(gpu):
        return [None if array is None else cupy.asarray(array) for array in operands(layer)]


def right(layer: ConvLayer, out: Any) -> bool:
    arrays = operands(layer)
    return error(np.asarray(out), convolve(layer, *arrays), magnitude(layer, *arrays)) <= 2e-6
