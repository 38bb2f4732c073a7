"""What may fail with a GPU, on a CuPy of NumPy arrays: no driver, no compiler, no memory, a device that is lost."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from faulty import measure
from hosts import LAYER, cache, cupy
from layers import edge
from simt.cases import named, only
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy, install, ndarray

import autoconv
from autoconv.cuda import device as module
from autoconv.cuda.codegen import compiler
from autoconv.cuda.codegen.compiler import CompileError
from autoconv.cuda.device import CUDA
from autoconv.cuda.gemm.gemm import Gemm
from autoconv.cuda.hardware import why_unavailable
from autoconv.cuda.libraries.cublas_cufft import LibraryError
from autoconv.errors import DeviceLostError, PlanError
from autoconv.records.cache import TuningCache
from autoconv.registry import resolve
from autoconv.tuning.planner import plan

__all__ = ["cache", "cupy"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


def test_without_a_gpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install 'autoconv[cuda13]'" in why_unavailable()
    for name in ("cuda", "cuda:0"):
        with pytest.raises(PlanError, match="no CUDA device: CuPy is not importable"):
            resolve(name)


@pytest.mark.parametrize(
    ("gpus", "driver", "reason"),
    [
        (None, 0, "CuPy 14.2.0 finds no usable driver (cudaErrorInsufficientDriver"),
        (0, 13020, "the driver sees no GPU"),
        (1, 12040, "the driver is of CUDA 12.4, older than the compiler, NVRTC 13.0"),
    ],
)
def test_a_missing_or_old_driver_is_named(
    gpus: int | None, driver: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeCuPy(gpus, driver=driver), monkeypatch)
    assert reason in why_unavailable()
    with pytest.raises(PlanError, match="no CUDA device"):
        CUDA.current()


def test_no_compiler_is_named(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompileError("no NVRTC library")

    monkeypatch.setattr(compiler, "nvrtc", missing)
    assert why_unavailable() == "no NVRTC library"


def test_kernels_that_the_driver_does_not_load_are_recorded(
    monkeypatch: pytest.MonkeyPatch, cache: TuningCache
) -> None:
    """A driver older than the kernels, found out only when one is loaded."""
    install(FakeCuPy(1, driver=12080), monkeypatch)
    with pytest.raises(CompileError, match=r"the driver \(of CUDA 12.8\) does not load direct as NVRTC 13.0 compiled"):
        plan(LAYER, "direct", device=CUDA(0), cache=cache)


def test_a_candidate_without_room_is_left_out_and_the_tuning_goes_on(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is known beforehand to be too large, another is told so by the allocation itself."""
    gemm = named("gemm")
    only(monkeypatch, "direct", "gemm")
    layer = edge("fully connected", N=1, C=64, H=2, W=2, R=2, S=2)
    split = {str(c) for c in gemm.all(layer, CUDA(0)) if c.params["SPLIT"] != 1}
    with monkeypatch.context() as scarce:
        scarce.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (100, 100))
        made = plan(layer, device="cuda", cache=cache, vendors=False)
    assert split & made.facts.keys()
    for name, facts in made.facts.items():
        assert (facts.failure is not None) == (name in split)
        assert facts.failure is None or facts.failure.startswith(
            "unreached, no memory: needs 0 MiB, and 0 MiB are free"
        )

    def full(*_: object) -> None:
        raise MemoryError("Out of memory allocating 64 bytes")

    other = edge("fully connected", N=1, C=20, H=1, W=1, R=1, S=1)
    with monkeypatch.context() as scarce:
        scarce.setattr(type(gemm), "build", full)
        made = plan(other, device="cuda", cache=cache, vendors=False)
    failures = {facts.failure for name, facts in made.facts.items() if name.startswith("gemm")}
    assert failures == {"unreached, no memory: MemoryError: Out of memory allocating 64 bytes"}
    assert made.candidate.algorithm == "direct"
    autoconv.forget_plans()
    again = plan(other, device="cuda", cache=cache, vendors=False)
    assert {facts.failure for facts in again.facts.values()} == {None}  # it was no fault of theirs


def test_the_operands_are_copied_once_for_all_who_are_timed(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies, of which a graph takes one after the other, are the largest thing in memory."""
    layer = edge("plain", N=1, C=4, K=8)
    copied: list[Any] = []
    monkeypatch.setattr(ndarray, "copy", lambda self: copied.append(self.shape) or cupy.asarray(self), raising=False)
    candidates = named("gemm").all(layer, CUDA(0))
    counts = []
    for some in (candidates[:1], candidates[:3]):
        copied.clear()
        assert {facts.failure for facts in measure(layer, CUDA(0), some).values()} == {None}
        counts.append(copied.count(layer.x_shape))
    assert counts[0] == counts[1] > 1


def test_a_candidate_that_raises_while_it_is_captured_fails_alone(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "direct", "gemm")
    load = Gemm.load

    def refusing(self: Gemm, device: CUDA, units: Any) -> Any:
        def unless_captured(launch: Any) -> Any:
            def run(*arguments: Any) -> None:
                if cupy.current_stream.is_capturing():
                    raise RuntimeError("not while captured")
                launch(*arguments)

            return run

        return [unless_captured(launch) for launch in load(self, device, units)]

    monkeypatch.setattr(Gemm, "load", refusing)
    made = plan(LAYER, device="cuda", cache=cache, vendors=False)
    failures = {facts.failure for name, facts in made.facts.items() if name.startswith("gemm")}
    assert failures == {"RuntimeError: not while captured"}
    assert made.candidate.algorithm == "direct"
    assert not cupy.capturing


def test_without_cufft_the_rest_is_tuned_and_planned(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of its workspace is the library's to say."""
    only(monkeypatch, "direct", "fft")

    def missing(*_: object) -> None:
        raise LibraryError("libcufft.so.12 does not load")

    monkeypatch.setattr(module, "cufft", missing)
    monkeypatch.setattr(module, "cublas", missing)
    layer = LAYER.replace(R=5, S=5, padding=2)
    transforms = named("fft").all(layer, CUDA(0))
    assert transforms
    found = measure(layer, CUDA(0), [*named("direct").all(layer, CUDA(0)), *transforms])
    assert {facts.failure for one, facts in found.items() if one.algorithm == "fft"} == {
        "LibraryError: libcufft.so.12 does not load"
    }
    made = plan(layer, device="cuda", cache=cache, vendors=False)
    assert made.candidate.algorithm == "direct"
    assert "libcufft.so.12 does not load" in made.explain()


def test_too_little_memory_to_verify_anything_is_said(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "direct")
    cupy.memory = 8000  # the arrays take 5000, and not all that verifying needs
    with pytest.raises(PlanError, match="not enough memory on Fake GPU to verify fwd-float32"):
        plan(LAYER, device="cuda", cache=cache, vendors=False)


def test_a_sticky_error_ends_the_tuning_and_leaves_the_cache_intact(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = named("gemm")
    only(monkeypatch, "direct")
    before = plan(LAYER, device="cuda", cache=cache, vendors=False).facts
    only(monkeypatch, "direct", "gemm")

    def strays(*_: object) -> None:
        cupy.fault = "cudaErrorIllegalAddress: an illegal memory access was encountered"
        cupy.runtime_call()

    monkeypatch.setattr(type(gemm), "build", strays)
    with pytest.raises(DeviceLostError, match=r"Fake GPU is lost to this process \(cudaErrorIllegalAddress"):
        plan(LAYER.replace(N=2), device="cuda", cache=cache, vendors=False)
    cupy.fault = ""
    (record,) = cache.records()
    assert {str(candidate): facts for candidate, facts in record.facts().items()} == before
