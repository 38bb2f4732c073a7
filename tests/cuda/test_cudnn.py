"""cuDNN's numbered algorithms as candidates, against a library that computes on the host; and plans with cuDNN."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
from cudnn_library import DEVICE, FUSED, GRAPH, NUMBERED, absent, built, calls, check, checked, forget, library
from layers import edge
from simt.emulator import MISSING, Emulated

from autoconv import registry
from autoconv.cuda.libraries import ALGORITHMS as CUDNN
from autoconv.cuda.libraries import algorithm as vendor
from autoconv.cuda.libraries import cudnn, cudnn_graph
from autoconv.cuda.libraries.cublas_cufft import LibraryError
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve

__all__ = ["absent", "built", "library"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator and the library need g++")
SYMMETRIC = [
    "one", "remainders", "valid", "pointwise padded", "strided", "stride skips pixels", "dilated strided",
    "filter beyond the image", "grouped", "depthwise multiplier", "one-dimensional",
]  # fmt: skip


@pytest.mark.parametrize("name", SYMMETRIC)
def test_every_algorithm_agrees_with_float64(name: str, library: Any) -> None:
    """Descriptors, their strides, and the order of arguments, in every direction, layout and type."""
    ran = set()
    for direction, layout, dtype in itertools.product(DIRECTIONS, LAYOUTS, DTYPES):
        layer = edge(name, direction=direction, layout=layout, dtype=dtype)
        ran |= {(direction, dtype, candidate) for candidate in checked(NUMBERED, layer)}
    assert {(d, t) for d, t, _ in ran} == set(itertools.product(DIRECTIONS, DTYPES))
    assert {c for d, t, c in ran if (d, t) == ("dgrad", "float32")} == {
        *(f"cudnn[ALGO={name},MATH=fma]" for name in ("algo_1", "fft_tiling", "winograd", "winograd_nonfused")),
        *(f"cudnn.tf32[ALGO={name},MATH=tf32]" for name in ("algo_1", "fft_tiling", "winograd", "winograd_nonfused")),
        "cudnn.atomic[ALGO=algo_0,MATH=fma]",
        "cudnn.atomic.tf32[ALGO=algo_0,MATH=tf32]",
    }  # the library refuses the algorithm numbered 2


@pytest.mark.parametrize("epilogue", FUSED)
def test_the_epilogue_is_the_librarys_own_or_ours_or_refused(epilogue: str, library: Any) -> None:
    for layout, dtype, residual in itertools.product(LAYOUTS, DTYPES, (False, True)):
        layer = edge("grouped", layout=layout, dtype=dtype, **(FUSED[epilogue] | {"residual": residual}))
        for algorithm in NUMBERED:
            for candidate in algorithm.all(layer, DEVICE):
                native = layer.activation == "relu" or candidate.params["ALGO"] == "implicit_precomp_gemm"
                reasons = algorithm.why_not(layer, DEVICE, candidate.params)
                if candidate.params["ALGO"] == "direct":
                    assert reasons
                elif native or dtype in ("float32", "float64"):
                    library.fake_forget()
                    check(algorithm, layer, candidate.params)
                    assert calls(library)[0].split()[0] == ("fused" if native else "forward")
                else:
                    assert "would round" in reasons[0]


def test_arithmetic_and_stream_reach_the_library(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulated, "launches_on", lambda self: 0x7B)
    layer = edge("grouped")
    for algorithm, dtype, arithmetic, number in (
        (CUDNN[0], "float32", "fma", 3),
        (CUDNN[0], "float16", "tensor", 1),
        (CUDNN[2], "float32", "tf32", 0),
    ):
        library.fake_forget()
        check(algorithm, layer.replace(dtype=dtype), {"ALGO": "implicit_precomp_gemm", "MATH": arithmetic})
        kind = cudnn.TYPES[dtype]
        assert calls(library) == [f"forward algorithm=1 math={number} groups=3 type={kind} stream=0x7b"]


def test_what_the_library_refuses_says_so(library: Any) -> None:
    algorithm = CUDNN[0]
    (reason,) = algorithm.why_not(edge("remainders"), DEVICE, {"ALGO": "direct", "MATH": "fma"})
    assert reason == "cudnnGetConvolutionForwardWorkspaceSize: CUDNN_STATUS_NOT_SUPPORTED"
    uneven = edge("asymmetric")
    assert "expected the same on both sides" in algorithm.why_not(uneven, DEVICE, {"ALGO": "gemm", "MATH": "fma"})[0]
    assert len(algorithm.why_not(edge("remainders"), DEVICE, {"ALGO": "algo_1", "MATH": "tf32"})) == 2
    with pytest.raises(LibraryError, match="BAD_PARAM"):
        cudnn.Convolution(edge("remainders"), "fma").run(0, 0, 1, 0, 0, 0, (0, 0))  # without the workspace it needs


def test_descriptors_go_with_what_they_describe(library: Any) -> None:
    gc.collect()
    before = library.fake_live()
    made = cudnn.Convolution(edge("remainders", bias=True, activation="relu"), "fma")
    assert library.fake_live() == before + 6
    del made
    gc.collect()
    assert library.fake_live() == before


def test_a_plan_takes_it_where_vendors_are_allowed(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_table", lambda kind: CUDNN)
    monkeypatch.setattr("autoconv.tuning.verification.direct", lambda layer, device: Exact(layer))
    cache, layer = TuningCache(tmp_path, system=None), edge("remainders")
    device = Emulated(capability=89)
    made = plan(layer, device=device, cache=cache, vendors=True)
    assert not made.facts[str(made.candidate)].tf32
    assert made.facts["cudnn.graph[ENGINE=10]"].workspace == 1000
    assert made.facts["cudnn.graph[ENGINE=10]"].vendor == "cudnn"
    assert any(name.startswith("cudnn.graph.tf32") and facts.tf32 for name, facts in made.facts.items())
    assert made.facts["cudnn[ALGO=gemm,MATH=fma]"].vendor == "cudnn"
    assert made.facts["cudnn[ALGO=gemm,MATH=fma]"].workspace == 128
    assert any(name.startswith("cudnn.tf32") and facts.tf32 for name, facts in made.facts.items())


class Exact(vendor.CudnnKernel):
    """In place of a direct kernel, to verify against."""

    def __init__(self, layer: ConvLayer) -> None:
        self.layer = layer

    def run(self, a: Any, b: Any, out: Any, bias: Any, residual: Any, workspace: Any) -> None:
        out[...] = convolve(self.layer, a, b, bias, residual)


def test_without_the_library_it_says_where_to_get_it(absent: None, tmp_path: Path) -> None:
    layer = edge("remainders")
    (reason,) = CUDNN[0].why_not(layer, DEVICE, {"ALGO": "gemm", "MATH": "fma"})
    assert reason.startswith("no libcudnn.so.9: it comes with nvidia-cudnn-cu13")
    assert CUDNN[0].version == "absent"
    assert not CUDNN[0].installed()
    made = plan(layer, "heuristic", device=DEVICE, cache=TuningCache(tmp_path, system=None), vendors=True)
    assert (
        "cudnn is not among the libraries that the option vendors allows"
        in made.reasons["cudnn[ALGO=gemm,MATH=fma]"][0]
    )
    (reason,) = GRAPH[0].why_not(layer, DEVICE, GRAPH[0].all(layer, DEVICE)[0].params)
    assert reason.startswith("no libcudnn.so.9")


def test_a_vendor_that_is_not_wanted_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()

    def forbidden() -> None:
        raise AssertionError("loaded")

    for module in (cudnn, cudnn_graph):
        monkeypatch.setattr(module, "library", forbidden)
    monkeypatch.setattr(cudnn, "installed", lambda: True)
    made = plan(edge("remainders"), "heuristic", device=DEVICE, cache=TuningCache(tmp_path, system=None), vendors=False)
    assert made.reasons["cudnn[ALGO=gemm,MATH=fma]"]
    assert "not among the libraries that the option vendors allows" in made.reasons["cudnn.graph"][0]
    assert made.candidate.algorithm != "cudnn"


def test_it_is_looked_for_in_wheels_and_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, folder in (("nvidia", "nvidia/cudnn/lib"), ("torch", "torch/lib")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / cudnn.SONAME).write_bytes(b"not a library")

        class Spec:
            submodule_search_locations = (str(tmp_path / package),)

        monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name, p=package, s=Spec: s if name == p else None)
        assert str(tmp_path / folder / cudnn.SONAME) in list(cudnn.places())
