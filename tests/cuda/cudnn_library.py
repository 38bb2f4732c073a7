"""A library of cuDNN's interface that computes on the host and writes down its calls, or none."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from layers import operands
from simt.emulator import Emulated

from autoconv.algorithm import Algorithm, Candidate
from autoconv.cuda.libraries import ALGORITHMS as CUDNN
from autoconv.cuda.libraries import algorithm as vendor
from autoconv.cuda.libraries import cudnn, cudnn_graph
from autoconv.layer import ConvLayer
from autoconv.tuning import planner
from autoconv.tuning.reference import convolve, error, magnitude

DEVICE = Emulated(capability=90)
NUMBERED = [algorithm for algorithm in CUDNN if not algorithm.asks_vendor]
GRAPH = [algorithm for algorithm in CUDNN if algorithm.asks_vendor]
FUSED: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "relu": {"activation": "relu"},
    "bias residual relu": {"bias": True, "residual": True, "activation": "relu"},
}


def forget() -> None:
    listed = (vendor._offered, vendor._tried, vendor._configured)
    vendors = (vendor._convolution, vendor._workspace, *listed, vendor._plan)
    graphs = (cudnn_graph.graph, cudnn_graph._ready)
    for remembered in (cudnn.library, cudnn.installed, planner._installed, *vendors, *graphs):
        remembered.cache_clear()
    cudnn._handles.__dict__.clear()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an empty cuBLASLt, in the folders of NVIDIA's wheels."""
    source, root = Path(__file__).parents[1] / "simt" / "fake_cudnn.cpp", tmp_path_factory.mktemp("site") / "nvidia"
    target, beside = root / "cudnn/lib/libcudnn.so.9", root / "cu13/lib/libcublasLt.so.13"
    for text, library in ((source, target), ("/dev/null", beside)):
        library.parent.mkdir(parents=True)
        subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-xc++", text, "-o", library], check=True)
    return target


@pytest.fixture
def library(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    forget()
    monkeypatch.setattr(cudnn, "places", lambda: iter([str(built)]))
    found = cudnn.library()
    found.fake_calls.restype = ctypes.c_char_p
    found.fake_forget()
    yield found
    forget()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setattr(cudnn, "places", lambda: iter(["/nowhere/libcudnn.so.9"]))
    monkeypatch.setattr(cudnn, "loaded", lambda: False)
    yield
    forget()


def calls(library: Any) -> list[str]:
    return str(library.fake_calls().decode()).splitlines()


def check(algorithm: Algorithm, layer: ConvLayer, params: Any) -> None:
    given = operands(layer)
    a, b, bias, residual = (None if array is None else array.copy() for array in given)
    kernel = algorithm.build(layer, DEVICE, params)
    assert kernel.workspace_bytes == algorithm.workspace_bytes(layer, DEVICE, params)
    out = DEVICE.empty(layer.output_shape, layer.numpy_dtype)
    kernel.run(a, b, out, bias, residual, DEVICE.buffer(kernel.workspace_bytes))
    found = error(out, convolve(layer, *given), magnitude(layer, *given))
    assert found <= algorithm.bound(layer, params), f"{algorithm.name} {params} on {layer}: {found:.1e}"


def checked(algorithms: Iterable[Algorithm], layer: ConvLayer, once: str = "") -> set[str]:
    """The candidates that can run, or the first with each value of a parameter, all of which gave the right answer."""
    found, seen = set(), set()
    for algorithm in algorithms:
        for candidate in algorithm.all(layer, DEVICE):
            assert Candidate.parse(str(candidate)) == candidate
            if once and candidate.params[once] in seen:
                continue
            seen.add(candidate.params.get(once))
            if not algorithm.why_not(layer, DEVICE, candidate.params):
                assert algorithm.estimate(layer, DEVICE, candidate.params) > 0
                check(algorithm, layer, candidate.params)
                found.add(str(candidate))
    return found
