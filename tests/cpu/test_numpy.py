"""Every algorithm of the CPU against the oracle, over the whole space of layers."""

from __future__ import annotations

import contextlib
import importlib
import math
import tracemalloc
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from guards import allowed
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import EDGES, EPILOGUES, edge, everyday, layers, operands
from vectors import device_with

from autoconv.algorithm import Algorithm, Candidate, Kernel
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.common import pools
from autoconv.layer import DIRECTIONS, LAYOUTS, ConvLayer
from autoconv.registry import algorithms
from autoconv.tuning import reference

# One thread: two BLAS pools on the processors of a busy machine wait for each other at every product.
DEVICE = CPU.current(threads=1)
GUARD = 4096  # bytes on either side of the output and of the workspace
POISON = 0xFF  # NaN in every floating-point type


SMALL_CACHES = 256, 2048, 16384  # this machine with caches so small that even test layers are cut into blocks


SMALL = device_with(DEVICE.instruction_set, 1, SMALL_CACHES)

NUMPY = tuple(algorithm for algorithm in algorithms(DEVICE) if algorithm.name.startswith("numpy."))
OURS = tuple(algorithm for algorithm in algorithms(DEVICE) if algorithm.vendor is None)
OTHERS = tuple(algorithm for algorithm in algorithms(DEVICE) if algorithm not in NUMPY)


@dataclass(frozen=True)
class Guarded:
    """A buffer between two guard zones, all of it poisoned."""

    whole: Any
    nbytes: int

    @classmethod
    def allocate(cls, nbytes: int) -> Guarded:
        whole = DEVICE.buffer(-(-nbytes // 64) * 64 + 2 * GUARD)
        whole[:] = POISON
        return cls(whole, nbytes)

    @property
    def inside(self) -> Any:
        return self.whole[GUARD : GUARD + self.nbytes]

    def intact(self) -> bool:
        return bool((self.whole[:GUARD] == POISON).all() and (self.whole[GUARD + self.nbytes :] == POISON).all())


def launch(algorithm: Algorithm, layer: ConvLayer, candidate: Candidate, arrays: tuple[Any, ...], device: CPU) -> Any:
    """The output of the candidate, built for the purpose."""
    return outcome(algorithm.build(layer, device, candidate.params), layer, candidate, arrays)


def outcome(kernel: Kernel, layer: ConvLayer, candidate: Candidate, arrays: tuple[Any, ...]) -> Any:
    """The kernel's output, after checks that it kept to its buffers and left its inputs alone."""
    out = Guarded.allocate(math.prod(layer.output_shape) * layer.itemsize)
    workspace = Guarded.allocate(kernel.workspace_bytes)
    packed = Guarded.allocate(kernel.packed_bytes)
    a, b, bias, residual = arrays
    before = [None if array is None else array.copy() for array in arrays]
    if kernel.packed_bytes:
        kernel.pack(b, packed.inside)
        b = packed.inside
    y = out.inside.view(layer.numpy_dtype).reshape(layer.output_shape)
    kernel.run(a, b, y, bias, residual, workspace.inside)
    assert out.intact(), f"{candidate} wrote outside its output"
    assert workspace.intact(), f"{candidate} wrote outside its workspace"
    assert packed.intact(), f"{candidate} wrote outside its packed filters"
    for array, copy in zip(arrays, before, strict=True):
        assert array is None or array.tobytes() == copy.tobytes(), f"{candidate} changed its input"
    return y


def check(
    layer: ConvLayer,
    seed: int = 0,
    device: CPU = DEVICE,
    algorithms: tuple[Algorithm, ...] = algorithms(DEVICE),
    everything: bool = False,
) -> None:
    """Every candidate agrees with the oracle within its bound, and with itself; or says why it cannot run.

    Algorithms that build slowly have one candidate checked, or with `everything` all of them.
    """
    arrays = operands(layer, seed)
    want, magnitude = reference.convolve(layer, *arrays), reference.magnitude(layer, *arrays)
    for algorithm in algorithms:
        able = []
        for candidate in algorithm.all(layer, device):
            reasons = algorithm.why_not(layer, device, candidate.params)
            assert isinstance(reasons, list)
            assert all(isinstance(reason, str) and reason for reason in reasons)
            if not reasons:
                able.append(candidate)
        for candidate in able if everything else everyday(algorithm, layer, able):
            kernel = algorithm.build(layer, device, candidate.params)
            got = outcome(kernel, layer, candidate, arrays)
            error = reference.error(got, want, magnitude)
            bound = allowed(algorithm, layer, candidate.params, want, magnitude)
            assert error <= bound, f"{candidate} on {layer}: error {error:.2e}, allowed {bound:.2e}"
            if algorithm.deterministic:
                again = outcome(kernel, layer, candidate, arrays)
                assert got.tobytes() == again.tobytes(), f"{candidate} on {layer}: two runs differ"


@pytest.mark.parametrize("device", [DEVICE, SMALL], ids=["whole", "in blocks"])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, device: CPU) -> None:
    for layout in LAYOUTS:
        for direction in DIRECTIONS:
            check(edge(name, layout=layout, direction=direction), device=device, algorithms=NUMPY)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", EDGES)
def test_edges_compiled(name: str, direction: str) -> None:
    """In the one layout or the other, as building takes time."""
    layout = LAYOUTS[zlib.crc32(f"{name} {direction}".encode()) % 2]
    check(edge(name, layout=layout, direction=direction), algorithms=OTHERS)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", ["remainders", "grouped", "depthwise", "pointwise", "five by five"])
def test_epilogues(name: str, epilogue: str) -> None:
    for layout in LAYOUTS:
        for dtype in ("float32", "float16"):
            check(edge(name, layout=layout, dtype=dtype, **EPILOGUES[epilogue]), algorithms=NUMPY)
    check(edge(name, **EPILOGUES[epilogue]), algorithms=OTHERS)


@given(layer=layers(), seed=st.integers(0, 2**32 - 1), device=st.sampled_from([DEVICE, SMALL]))
def test_any_layer(layer: ConvLayer, seed: int, device: CPU) -> None:
    check(layer, seed, device)


@pytest.mark.parametrize("name", ["plain", "grouped", "large filter", "many channels", "strided"])
def test_all_threads(name: str) -> None:
    for direction in DIRECTIONS:
        check(edge(name, direction=direction), device=CPU.current())


def runnable(algorithm: Algorithm, layer: ConvLayer, device: CPU = DEVICE) -> list[Candidate]:
    return [c for c in algorithm.all(layer, device) if not algorithm.why_not(layer, device, c.params)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["remainders", "strided", "dilated", "depthwise", "asymmetric", "stride skips pixels"])
def test_nonfinite_input_reaches_its_outputs(name: str, value: float) -> None:
    """Exact algorithms: those that see it, and no other. The rest: those at least. ReLU passes NaN on."""
    for layout in LAYOUTS:
        for direction in DIRECTIONS:
            epilogue = {"bias": True, "activation": "relu"} if direction == "fwd" and np.isnan(value) else {}
            layer = edge(name, layout=layout, direction=direction, **epilogue)
            arrays = operands(layer)
            arrays[0][tuple(extent // 2 for extent in arrays[0].shape)] = value
            want = np.isfinite(reference.convolve(layer, *arrays))
            for algorithm in (algorithm for algorithm in algorithms(DEVICE) if algorithm.vendor is None):
                for candidate in everyday(algorithm, layer, runnable(algorithm, layer)):
                    got = np.isfinite(launch(algorithm, layer, candidate, arrays, DEVICE))
                    agree = not got[~want].any() if algorithm.spreads_nonfinite else (got == want).all()
                    assert agree, f"{candidate} on {layer}"


@pytest.mark.parametrize("name", ["remainders", "dilated", "pointwise padded", "filter beyond the image"])
def test_nonfinite_filter(name: str) -> None:
    """It stays in its filter's outputs, and out of those where it meets only padding if that is skipped."""
    for layout in LAYOUTS:
        layer = edge(name, layout=layout)
        x, w, *epilogue = operands(layer)
        w[0, 0, 0, 0] = np.inf
        want = np.isfinite(reference.convolve(layer, x, w))
        for algorithm in (algorithm for algorithm in algorithms(DEVICE) if algorithm.vendor is None):
            for candidate in everyday(algorithm, layer, runnable(algorithm, layer)):
                got = np.isfinite(launch(algorithm, layer, candidate, (x, w, *epilogue), DEVICE))
                others = got[:, 1:] if layout == "NCHW" else got[..., 1:]
                assert others.all() or algorithm.spreads_nonfinite
                assert not got[~want].any()
                if algorithm.skips_padding:
                    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("algorithm", NUMPY, ids=lambda algorithm: algorithm.name)
def test_large_arrays_live_in_the_workspace(algorithm: Algorithm) -> None:
    """Whatever else a run or a packing allocates stays below a fixed size, on a layer of many megabytes."""
    with contextlib.suppress(ImportError):
        importlib.import_module("scipy.fft")  # which the first transform would import, and count as its own
    for direction in DIRECTIONS:
        for dtype in ("float32", "float16"):
            layer = ConvLayer(
                N=3, C=64, H=57, W=57, K=64, R=3, S=3, padding=1, layout="NHWC", dtype=dtype, direction=direction
            )
            arrays = operands(layer)
            for candidate in runnable(algorithm, layer):
                kernel = algorithm.build(layer, DEVICE, candidate.params)
                packed, workspace = DEVICE.buffer(kernel.packed_bytes), DEVICE.buffer(kernel.workspace_bytes)
                out = DEVICE.empty(layer.output_shape, layer.numpy_dtype)
                tracemalloc.start()
                if kernel.packed_bytes:
                    kernel.pack(arrays[1], packed)
                kernel.run(arrays[0], packed if kernel.packed_bytes else arrays[1], out, None, None, workspace)
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert peak < (4 << 20), f"{candidate} on {layer} allocated {peak} bytes"


def test_fewer_threads_hold_blas_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the product only, and only where the device has fewer threads than BLAS would take."""
    layer = edge("plain")
    seen: list[set[int]] = []
    matmul = np.matmul

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(blas_pools())
        return matmul(*args, **kwargs)

    def blas_pools() -> set[int]:
        return {pool["num_threads"] for pool in pools().select(user_api="blas").info()}

    before = blas_pools()
    monkeypatch.setattr(np, "matmul", spy)
    gemm = next(algorithm for algorithm in NUMPY if algorithm.name == "numpy.gemm")
    for threads, wanted in ((1, {1}), (max(before), before)):
        seen.clear()
        launch(gemm, layer, runnable(gemm, layer)[0], operands(layer), CPU.current(threads=threads))
        assert seen
        assert all(threads_held == wanted for threads_held in seen)
    assert blas_pools() == before


def test_every_reason_at_once() -> None:
    layer = ConvLayer(N=1, C=2, H=40, W=40, K=2, R=1, S=1, stride=2, dilation=3, padding=1)
    reasons = {
        str(candidate): algorithm.why_not(layer, DEVICE, candidate.params)
        for algorithm in NUMPY
        for candidate in algorithm.all(layer, DEVICE)
    }
    assert reasons["numpy.direct"] == []
    winograd = next(a for a in NUMPY if a.name == "numpy.winograd")
    assert winograd.why_not(layer, DEVICE, {"m": 2, "r": 3}) == ["dilation: expected 1x1, got 3x3"]
    undilated = winograd.why_not(layer.replace(dilation=1), DEVICE, {"m": 2, "r": 3})
    assert undilated == ["filter: expected 3x3, got 1x1", "stride: expected 1x1, got 2x2"]
    assert len(reasons["numpy.fft[tile=64]"]) == 2
    for algorithm in (a for a in NUMPY[1:] if layer.dtype in a.dtypes):
        foreign = {"tile": "nonsense"} if algorithm.name == "numpy.gemm" else {"tile": 7, "m": 7, "r": 7}
        against = algorithm.why_not(layer.replace(dilation=1), DEVICE, foreign)
        assert any("got 7" in reason or "got nonsense" in reason for reason in against)


def test_layers_without_a_single_product() -> None:
    """All taps fall on padding: zeros from everyone who takes the layer, which rounding must not disturb."""
    for direction in DIRECTIONS:
        check(ConvLayer(N=2, C=3, H=1, W=1, K=2, R=2, S=2, stride=2, padding=((2, 1), (0, 1)), direction=direction))
        check(ConvLayer(N=1, C=1, H=1, W=4, K=1, R=2, S=3, dilation=2, padding=1, direction=direction))
        check(ConvLayer(N=1, C=2, H=1, W=1, K=2, R=1, S=1, stride=2, padding=((1, 0), (0, 0)), direction=direction))


def test_sizes_beyond_32_bits() -> None:
    """Nothing is allocated: memory and time of a layer of 2^40 elements are asked for, and are right."""
    layer = ConvLayer(N=2**16, C=2**8, H=2**8, W=2**8, K=2**8, R=3, S=3, padding=1)
    whole = next(a for a in NUMPY if a.name == "numpy.gemm")
    assert whole.workspace_bytes(layer, DEVICE, {"tile": "image"}) == 9 * 4 * 2**24
    assert whole.workspace_bytes(layer, DEVICE, {"tile": "batch"}) == (9 + 1) * 4 * 2**40
    for algorithm in NUMPY:
        for candidate in runnable(algorithm, layer):
            assert 10 < algorithm.estimate(layer, DEVICE, candidate.params) < 1e6


@pytest.mark.stress
@pytest.mark.timeout(7200)
@settings(max_examples=2000, derandomize=False)
@given(layer=layers(), seed=st.integers(0, 2**32 - 1), device=st.sampled_from([DEVICE, SMALL]))
def test_any_layer_many_times(layer: ConvLayer, seed: int, device: CPU) -> None:
    """Of libraries not: some round gradients of narrow types twice, which verification refuses where it is too much."""
    check(layer, seed, device, OURS, everything=True)
