"""What tests of networks on a GPU share: a CuPy of NumPy with our simplest kernels, and a small network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simt.cases import only
from simt.fake_cupy import FakeCuPy, forget, install

from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Conv,
    Elementwise,
    TensorType,
)
from autoconv.records.cache import TuningCache


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuPy]:
    fake = install(FakeCuPy(), monkeypatch)
    only(monkeypatch, "direct")
    fake.current_stream = fake.cuda.Stream(non_blocking=True)
    yield fake
    forget()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"vendors": False, "cache": TuningCache(tmp_path, system=None)}


def scaled(count: int = 2) -> Graph:
    """A network of two small kernels: a pointwise convolution, and what no kernel applies while it stores."""
    graph = Graph("scaled")
    x = graph.add_input("x", TensorType((1, 2, 3, 4)))
    w = graph.add_constant("w", np.arange(2 * count, dtype=np.float32).reshape(count, 2, 1, 1))
    graph.outputs["y"] = graph.add("y", Elementwise(("tanh", 0)), graph.add("conv", Conv(), x, w))
    return graph


def answer(net: CompiledNetwork, cupy: FakeCuPy, inputs: dict[str, np.ndarray]) -> Any:
    return net.run(**{name: cupy.asarray(array) for name, array in inputs.items()})
