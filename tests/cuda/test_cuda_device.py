"""The CUDA device without hardware: the planner, packing, cache and faults, on the emulator's kernels."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import edge, edges, operands
from simt.cases import OURS, only
from simt.emulator import MISSING, Emulated, EmulationError

import autoconv.cuda
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common import code_hash
from autoconv.cuda.codegen.compiler import CompileError
from autoconv.cuda.codegen.source import Unit, file_text, files_of, wide
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.cuda.direct.direct import Direct
from autoconv.cuda.gemm.gemm import Gemm
from autoconv.errors import ArrayError
from autoconv.layer import DIRECTIONS, ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.registry import algorithms
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
DEVICE = Emulated(capability=80)
ROOT = Path(autoconv.cuda.__file__).parent


def on(device: Emulated, *arrays: Any) -> list[Any]:
    copies = [None if a is None else device.empty(a.shape, a.dtype) for a in arrays]
    for copy, array in zip(copies, arrays, strict=True):
        if copy is not None:
            copy[...] = array
    return copies


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path)


def test_every_algorithm_is_in_the_table() -> None:
    registered = {type(algorithm) for algorithm in algorithms(DEVICE)}
    for module in pkgutil.walk_packages(autoconv.cuda.__path__, "autoconv.cuda."):
        for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(found, Algorithm) and "name" in vars(found) and not inspect.isabstract(found):
                assert found in registered, f"{module.name}: {found.__name__} is not in ALGORITHMS"
    assert len({algorithm.name for algorithm in algorithms(DEVICE)}) == len(registered)


@pytest.mark.parametrize("algorithm", OURS, ids=lambda a: a.name)
def test_contract(algorithm: Algorithm) -> None:
    assert algorithm.version
    for direction in DIRECTIONS:
        for layer in edges(direction=direction).values():
            candidates = algorithm.all(layer, DEVICE)
            assert candidates == algorithm.all(layer, DEVICE)
            assert len(set(candidates)) == len(candidates)
            for candidate in candidates:
                assert Candidate.parse(str(candidate)) == candidate
                if not algorithm.why_not(layer, DEVICE, candidate.params):
                    assert algorithm.estimate(layer, DEVICE, candidate.params) > 0
                    assert 0 < algorithm.bound(layer, candidate.params) < 1e-3
                    assert direction != "wgrad" or not algorithm.packed_bytes(layer, DEVICE, candidate.params)


@pytest.mark.parametrize("algorithm", OURS, ids=lambda a: a.name)
def test_a_version_is_made_of_all_text_that_is_compiled(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(algorithm, CudaAlgorithm)
    files, before = code_hash._files("cuda"), algorithm.version
    for name in {f"cuda/{file}" for kernel in algorithm.files for file in files_of(kernel)}:
        monkeypatch.setattr(code_hash, "_files", lambda room, name=name: files | {name: ("changed", [])})
        code_hash.version.cache_clear()
        assert algorithm.version != before, name
    code_hash.version.cache_clear()


FILES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.cu*"))]


@pytest.mark.parametrize("file", FILES)
def test_includes_stand_at_the_top_and_lead_to_files(file: str) -> None:
    """So that a text put together here is what a compiler would make of the includes."""
    code = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("//")]
    kinds = [line.startswith(("#pragma once", "#include")) for line in code]
    assert kinds == sorted(kinds, reverse=True)
    assert ("#pragma once" in code) == file.endswith(".cuh")
    assert all((ROOT / other).is_file() for other in files_of(file))
    assert len(set(files_of(file))) == len(files_of(file))


def test_lines_keep_their_numbers() -> None:
    layer = edge("plain")
    unit = Gemm().units(layer, next(iter(Gemm().candidates(layer, DEVICE))))[0]
    assert unit.text.index("codegen/ptx.cuh") < unit.text.index("codegen/layer.cuh") < unit.text.index("gemm/gemm.cu")
    own = unit.text.split('#line 1 "gemm/gemm.cu"\n')[1].splitlines()
    for number, line in enumerate((ROOT / "gemm/gemm.cu").read_text().splitlines()):
        if "//" not in line and not line.startswith("#include"):
            assert own[number] == line


def test_the_example_of_constants_is_one() -> None:
    layer = ConvLayer(N=8, C=64, H=56, W=56, K=64, R=3, S=3, padding=1)
    unit = Gemm().units(layer, {"BM": 128, "BN": 128, "BK": 16, "TM": 8, "TN": 8, "SPLIT": 1})[0]
    generated = unit.text.split('#line 1 "codegen/layer.cuh"\n')[1].split("\n#line")[0]
    assert file_text("codegen/layer.cuh").strip() == generated.strip()


def test_large_arrays_are_addressed_with_64_bits() -> None:
    layer = ConvLayer(N=64, C=64, H=512, W=512, K=64, R=3, S=3)
    assert wide(layer)
    assert not wide(layer.replace(N=1))
    (unit,) = Direct().units(layer, {})
    assert "using Offset = long long" in unit.text


@needs_compiler
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_planner_runs_kernels(direction: str, cache: TuningCache) -> None:
    """A heuristic plan, a timed one of a single family, and the cached answer: all agree with float64."""
    layer = edge("remainders", direction=direction)
    given = operands(layer)
    a, b, *_ = on(DEVICE, *given)
    for how in ("heuristic", "direct"):
        made = plan(layer, how, device=DEVICE, cache=cache)
        found = error(made.run(a, b), convolve(layer, *given), magnitude(layer, *given))
        assert found <= 3e-5


@needs_compiler
def test_winograd_packs_its_filters_once(cache: TuningCache) -> None:
    layer = edge("remainders", bias=True, activation="relu")
    given = operands(layer)
    a, b, bias, _ = on(DEVICE, *given)
    made = plan(layer, "winograd[m=2,BM=64,BN=64]", device=DEVICE, cache=cache)
    packed = made.pack(b)
    np.testing.assert_array_equal(made.run(a, packed, bias), made.run(a, b, bias))
    assert error(made.run(a, packed, bias), convolve(layer, *given), magnitude(layer, *given)) <= 4e-6


@needs_compiler
def test_faults_of_arrays(cache: TuningCache) -> None:
    layer = edge("plain", padding=1, K=8)
    a, b, *_ = on(DEVICE, *operands(layer))
    made = plan(layer, "direct", device=DEVICE, cache=cache)
    right = made.run(a, b)
    strided = np.ascontiguousarray(a.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    np.testing.assert_array_equal(made.run(strided, b), right)  # copied
    shifted = DEVICE.empty((a.size + 1,), a.dtype)[1:].reshape(a.shape)
    shifted[...] = a
    assert not DEVICE.ready(shifted)  # contiguous, but no wide load may touch it
    np.testing.assert_array_equal(made.run(shifted, b), right)
    with pytest.raises(ArrayError, match="overlaps"):
        made.run(a, b, out=a)
    with pytest.raises(ArrayError, match="list"):
        made.run([1.0], b)  # type: ignore[arg-type]


class Faulty(Emulated):
    """A device on which some kernels fail to compile, or to launch."""

    fault: str

    def load(self, unit: Unit) -> Callable[..., None]:
        if unit.function == "gemm" and self.fault == "compile":
            raise CompileError("NVRTC 13.0 for sm_80: no")

        def launch(*arguments: Any) -> None:
            raise EmulationError("cudaErrorLaunchFailure: unspecified launch failure")

        return launch if unit.function == "gemm" else super().load(unit)


@needs_compiler
@pytest.mark.parametrize("fault", ["compile", "launch"])
def test_a_kernel_that_fails_is_recorded_and_the_rest_goes_on(
    fault: str, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault, raising=False)
    only(monkeypatch, "direct", "gemm")
    layer = edge("fully connected")
    made = plan(layer, device=Faulty(capability=80), cache=cache)
    assert made.candidate.algorithm == "direct"
    failures = [facts.failure for name, facts in made.facts.items() if name.startswith("gemm")]
    assert failures
    assert all(failures)


def test_a_device_travels_to_a_worker() -> None:
    assert pickle.loads(pickle.dumps(DEVICE)) == DEVICE
    assert DEVICE.key == "cuda-emulated_sm_80-sm80-4SMs"
    assert {DEVICE.peak_flops(dtype) > 0 for dtype in ("float32", "float64", "float16", "bfloat16")} == {True}
