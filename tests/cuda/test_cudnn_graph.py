"""The engines of cuDNN's graph interface as candidates, against a library that computes on the host."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cudnn_library import DEVICE, FUSED, GRAPH, NUMBERED, built, calls, check, checked, forget, library
from layers import edge, operands
from simt.emulator import MISSING, Emulated

from autoconv.algorithm import Algorithm, Candidate
from autoconv.cuda.libraries import cudnn, cudnn_graph
from autoconv.cuda.libraries.cublas_cufft import LibraryError
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer

__all__ = ["built", "library"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator and the library need g++")
UNEVEN = ["asymmetric", "same strided", "padding beyond the filter"]


@pytest.mark.parametrize("name", ["one", "dilated strided", "grouped", "one-dimensional", *UNEVEN])
def test_every_engine_agrees_with_float64(name: str, library: Any) -> None:
    for direction, layout, dtype in itertools.product(DIRECTIONS, LAYOUTS, DTYPES):
        layer = edge(name, direction=direction, layout=layout, dtype=dtype)
        found = checked(GRAPH, layer, once="ENGINE")
        winograd = {4} if (layer.R, layer.S, *layer.stride) == (3, 3, 1, 1) else set()
        # 5 and 9 round to narrower types, 7 takes nothing, 8 compiles and no heuristic names it
        assert {Candidate.parse(name).params["ENGINE"] for name in found} == {0, 1, 2, 3, 6, 10} | winograd


def names(algorithm: Algorithm, layer: ConvLayer) -> list[str]:
    return [str(candidate).removeprefix(algorithm.name) for candidate in algorithm.all(layer, DEVICE)]


def test_notes_decide_the_family_and_ranks_what_is_tried(library: Any) -> None:
    ranked = [f"[ENGINE=1,KNOBS=2-{choice}.5-{choice % 2}]" for choice in range(10)]  # of 12, and one named twice
    plain = ["[ENGINE=0]", "[ENGINE=6]", "[ENGINE=4,METHOD=winograd]", "[ENGINE=10]"]
    exact, atomic, tf32, both = GRAPH
    for dtype in ("float32", "float64", "float16"):
        layer = edge("remainders", dtype=dtype)
        narrow = dtype == "float32"
        assert names(exact, layer) == (plain if narrow else ranked + plain)
        assert names(atomic, layer) == (["[ENGINE=2]"] if narrow else ["[ENGINE=3,KNOBS=2--1]", "[ENGINE=2]"])
        assert names(tf32, layer) == (ranked if narrow else [])
        assert names(both, layer) == (["[ENGINE=3,KNOBS=2--1]"] if narrow else [])
    assert names(exact, edge("remainders", dtype="bfloat16"))[:2] == [
        "[ENGINE=0]",
        "[ENGINE=6]",
    ]  # one heuristic refuses
    layer = edge("remainders")
    assert tf32.bound(layer, {"ENGINE": 1}) > exact.bound(layer, {"ENGINE": 4, "METHOD": "winograd"})
    assert exact.bound(layer, {"ENGINE": 4, "METHOD": "winograd"}) > exact.bound(layer, {"ENGINE": 0})
    layer = edge("many channels", dtype="float16", N=200)  # bound by arithmetic
    times = [exact.estimate(layer, DEVICE, candidate.params) for candidate in exact.all(layer, DEVICE)]
    assert times == sorted(times)
    assert times[0] < times[9] < times[10] / 2  # ranked, or without a promise


def test_knobs_and_stream_reach_the_library(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulated, "launches_on", lambda self: 0x7B)
    layer = edge("grouped", direction="wgrad", layout="NHWC")
    library.fake_forget()
    check(GRAPH[2], layer, {"ENGINE": 1, "KNOBS": "2-7.5-1"})
    assert calls(library) == ["wgrad engine=1 steps=0 type=0 groups=3 stream=0x7b knobs=2-7 5-1 "]


def test_an_engine_is_compiled_when_it_is_built_and_not_before(library: Any) -> None:
    layer, params = edge("remainders"), {"ENGINE": 6}
    library.fake_forget()
    assert not GRAPH[0].why_not(layer, DEVICE, params)
    assert GRAPH[0].workspace_bytes(layer, DEVICE, params) == 600
    assert calls(library) == []
    for _ in range(2):
        GRAPH[0].build(layer, DEVICE, params)
    assert calls(library) == ["compile engine=6"]
    with pytest.raises(LibraryError, match="COMPILATION_FAILED: an unlucky number"):
        GRAPH[0].build(layer, DEVICE, {"ENGINE": 6, "KNOBS": "14-13"})


def test_an_engine_on_record_is_made_again_by_its_name(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = edge("remainders", dtype="float16")
    recorded = str(GRAPH[0].all(layer, DEVICE)[3])
    forget()  # as another process
    monkeypatch.setattr(cudnn_graph, "offered", lambda gpu, layer: [])  # another device's record, say
    params = Candidate.parse(recorded).params
    assert params == {"ENGINE": 1, "KNOBS": "2-3.5-1"}
    assert not GRAPH[0].why_not(layer, DEVICE, params)
    check(GRAPH[0], layer, params)
    assert GRAPH[0].estimate(layer, DEVICE, params) > 0


@pytest.mark.parametrize(
    ("family", "params", "reason"),
    [
        (0, {"ENGINE": 7}, "cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED: the engine does not take this"),
        (0, {"ENGINE": 99}, "cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED: there is no such engine"),
        (
            0,
            {"ENGINE": 0, "KNOBS": "3-1"},
            "cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED: the engine has no such knob",
        ),
        (0, {"ENGINE": 1}, "notes of the engine: expected those of cudnn.graph, got tensor_core"),
        (2, {"ENGINE": 0}, "notes of the engine: expected those of cudnn.graph.tf32, got none"),
        (0, {"ENGINE": 2}, "notes of the engine: expected those of cudnn.graph, got nondeterministic"),
        (1, {"ENGINE": 0}, "notes of the engine: expected those of cudnn.graph.atomic, got none"),
        (2, {"ENGINE": 5}, "it rounds its operands to a narrower type"),
        (0, {"ENGINE": 9}, "it adds in a narrower type than float32"),
        (
            0,
            {"ENGINE": 4},
            "expected its full name, cudnn.graph[ENGINE=4,METHOD=winograd]",
        ),  # or its bound would be a sum's
        (0, {}, "ENGINE: expected a number, got none"),
    ],
)
def test_what_is_no_candidate_of_a_family_says_so(family: int, params: Any, reason: str, library: Any) -> None:
    assert GRAPH[family].why_not(edge("remainders"), DEVICE, params) == [reason]


def test_a_graph_that_is_refused_is_one_candidate_with_the_reason(library: Any) -> None:
    layer = edge("many images")
    (candidate,) = GRAPH[0].all(layer, DEVICE)
    assert str(candidate) == "cudnn.graph"
    (reason,) = GRAPH[0].why_not(layer, DEVICE, candidate.params)
    assert reason == "cudnnBackendFinalize: CUDNN_STATUS_NOT_SUPPORTED: this graph is not for me"


@pytest.mark.parametrize(("epilogue", "steps"), [("bias", 1), ("relu", 2), ("bias residual relu", 3), ("residual", 2)])
def test_the_epilogue_is_in_the_graph(epilogue: str, steps: int, library: Any) -> None:
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        layer = edge("grouped", dtype=dtype, layout=layout, **FUSED.get(epilogue, {"residual": True}))
        library.fake_forget()
        assert len(checked(GRAPH, layer, once="ENGINE")) == 7
        ran = [line.split()[2] for line in calls(library) if line.startswith("fwd")]
        assert ran == [f"steps={steps}"] * 7


def test_descriptors_of_a_graph_go_with_its_plan(library: Any) -> None:
    forget()
    gc.collect()
    layer, params = edge("remainders"), {"ENGINE": 1, "KNOBS": "2-3.5-1"}
    before = library.fake_live()
    kernel = GRAPH[2].build(layer, DEVICE, params)
    made = library.fake_live()
    out = DEVICE.empty(layer.output_shape, layer.numpy_dtype)
    a, b, _, _ = operands(layer)
    scratch = [DEVICE.buffer(kernel.workspace_bytes) for _ in range(2 * cudnn_graph.PACKS)]
    for workspace in scratch * 2:
        kernel.run(a, b, out, None, None, workspace)
    assert library.fake_live() == made + cudnn_graph.PACKS
    del kernel
    forget()
    gc.collect()
    assert library.fake_live() == before


def test_a_plan_serves_several_threads_with_a_handle_each(library: Any) -> None:
    layer, params = edge("remainders"), {"ENGINE": 0}
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(check, GRAPH[0], layer, params) for _ in range(8)]:
            done.result()
    check(GRAPH[0], layer, params)


def test_without_cublas_lt_the_graph_interface_is_not_asked(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process; the other interface serves."""
    monkeypatch.setattr(library, "_name", cudnn.SONAME)
    monkeypatch.setattr(cudnn_graph, "opened", opened_without_cupy)
    (candidate,) = GRAPH[0].all(edge("remainders"), DEVICE)
    assert GRAPH[0].why_not(edge("remainders"), DEVICE, candidate.params) == ["none of libcublasLt.so.13 can be loaded"]
    check(NUMBERED[0], edge("remainders"), {"ALGO": "gemm", "MATH": "fma"})


def opened_without_cupy(names: tuple[str, ...], module: str) -> Any:
    raise LibraryError(f"none of {', '.join(names)} can be loaded")


def test_a_library_without_the_graph_interface_says_so(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("cudnnBackend"):
                raise AttributeError(name)
            return getattr(library, name)

    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "library", Older)
        assert GRAPH[0].why_not(edge("remainders"), DEVICE, {}) == ["cuDNN 91900 has no cudnnBackendCreateDescriptor"]
