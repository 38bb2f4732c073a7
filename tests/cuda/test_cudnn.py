"""cuDNN as candidates, against a library of the same interface that computes on the host and writes down its calls."""

from __future__ import annotations

import ctypes
import gc
import itertools
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from layers import EPILOGUES, edge, operands
from simt.emulator import MISSING, Emulated

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cuda.libraries import ALGORITHMS as CUDNN
from autoconv.cuda.libraries import algorithm as vendor
from autoconv.cuda.libraries import cudnn, cudnn_graph
from autoconv.cuda.libraries.cublas_cufft import LibraryError
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning import planner
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator and the library need g++")
DEVICE = Emulated(capability=90)
UNEVEN = ["asymmetric", "same strided", "padding beyond the filter"]
NUMBERED = [algorithm for algorithm in CUDNN if not algorithm.asks_vendor]
GRAPH = [algorithm for algorithm in CUDNN if algorithm.asks_vendor]
SYMMETRIC = [
    "one", "remainders", "valid", "pointwise padded", "strided", "stride skips pixels", "dilated strided",
    "filter beyond the image", "grouped", "depthwise multiplier", "one-dimensional",
]  # fmt: skip


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


@pytest.mark.parametrize("name", ["one", "dilated strided", "grouped", "one-dimensional", *UNEVEN])
def test_every_engine_agrees_with_float64(name: str, library: Any) -> None:
    for direction, layout, dtype in itertools.product(DIRECTIONS, LAYOUTS, DTYPES):
        layer = edge(name, direction=direction, layout=layout, dtype=dtype)
        found = checked(GRAPH, layer, once="ENGINE")
        winograd = {4} if (layer.R, layer.S, *layer.stride) == (3, 3, 1, 1) else set()
        # 5 and 9 round to narrower types, 7 takes nothing, 8 compiles and no heuristic names it
        assert {Candidate.parse(name).params["ENGINE"] for name in found} == {0, 1, 2, 3, 6, 10} | winograd


@pytest.mark.parametrize("epilogue", list(EPILOGUES)[1:])
def test_the_epilogue_is_the_librarys_own_or_ours_or_refused(epilogue: str, library: Any) -> None:
    for layout, dtype, residual in itertools.product(LAYOUTS, DTYPES, (False, True)):
        layer = edge("grouped", layout=layout, dtype=dtype, **(EPILOGUES[epilogue] | {"residual": residual}))
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
        layer = edge("grouped", dtype=dtype, layout=layout, **EPILOGUES.get(epilogue, {"residual": True}))
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


def test_a_plan_takes_it_where_vendors_are_allowed(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_table", lambda kind: CUDNN)
    monkeypatch.setattr("autoconv.tuning.verification.direct", lambda layer, device: Exact(layer))
    cache, layer = TuningCache(tmp_path, system=None), edge("remainders")
    device = Emulated(capability=89)
    made = plan(layer, device=device, cache=cache, vendors=True)
    assert made.candidate.algorithm in ("cudnn", "cudnn.graph")
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
    assert "cudnn is not among the vendors allowed" in made.reasons["cudnn[ALGO=gemm,MATH=fma]"][0]
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
    assert "not among the vendors allowed" in made.reasons["cudnn.graph"][0]
    assert made.candidate.algorithm != "cudnn"


def test_it_is_looked_for_in_wheels_and_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, folder in (("nvidia", "nvidia/cudnn/lib"), ("torch", "torch/lib")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / cudnn.SONAME).write_bytes(b"not a library")

        class Spec:
            submodule_search_locations = (str(tmp_path / package),)

        monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name, p=package, s=Spec: s if name == p else None)
        assert str(tmp_path / folder / cudnn.SONAME) in list(cudnn.places())
