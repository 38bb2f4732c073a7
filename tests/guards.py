"""Arrays flush against memory that nobody may touch: a kernel that strays by one byte is killed."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from layers import operands

from autoconv.algorithm import Algorithm, Candidate, Params
from autoconv.common.types import ROUNDING
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

NONE = 0  # PROT_NONE


def guarded(array: Any, side: str) -> Any:
    """A copy whose first byte ("before") or last byte ("after") is next to an inaccessible page."""
    page = mmap.PAGESIZE
    inside = -(-max(array.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for offset in (0, page + inside):
        if protect(ctypes.c_void_p(whole.ctypes.data + offset), ctypes.c_size_t(page), NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    start = page if side == "before" else page + inside - array.nbytes
    copy = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def run_guarded(
    algorithm: Algorithm, layer: ConvLayer, device: CPU, candidate: Candidate, arrays: tuple[Any, ...], side: str
) -> Any:
    """The candidate's output on guarded operands; the workspace is guarded on both sides' behalf too."""
    kernel = algorithm.build(layer, device, candidate.params)
    a, b, bias, residual = (None if array is None else guarded(array, side) for array in arrays)
    if kernel.packed_bytes:
        packed = _aligned(kernel.packed_bytes, side)
        kernel.pack(b, packed)
        b = packed
    out = guarded(np.empty(layer.output_shape, layer.output_numpy_dtype), side)
    out.reshape(-1).view(np.uint8)[:] = 0xFF  # of floats, NaN
    kernel.run(a, b, out, bias, residual, _aligned(kernel.workspace_bytes, side))
    return out


def _aligned(nbytes: int, side: str) -> Any:
    """Poisoned bytes that start at a cache line, as promised; beside the page behind them only where both can be."""
    return guarded(np.full(nbytes, 0xFF, np.uint8), side if nbytes % 64 == 0 else "before")


def allowed(algorithm: Algorithm, layer: ConvLayer, params: Params, want: Any, magnitude: Any) -> float:
    """The error that one of our kernels may have: its bound, with no output rounded more than once."""
    share = np.abs(want).max() / max(np.max(magnitude), np.finfo(np.float64).tiny)
    return float(algorithm.bound(layer, params) - ROUNDING.get(layer.dtype, 0.0) * max(1 - share, 0))


def drawn(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of a grid in an order drawn by their names: the same every day, and another for another layer."""
    return sorted(candidates, key=lambda candidate: zlib.crc32(f"{candidate} of {len(candidates)}".encode()))


def some(candidates: Sequence[Candidate], number: int = 4) -> list[Candidate]:
    """So many of a grid; all of a few."""
    return drawn(candidates)[:number]


def some_runnable(algorithm: Algorithm, layer: ConvLayer, device: CPU, number: int = 4) -> list[Candidate]:
    """So many candidates that can run, drawn as `some` are; at least one, or whoever asks would check nothing."""
    able = (c for c in drawn(algorithm.all(layer, device)) if not algorithm.why_not(layer, device, c.params))
    found = list(itertools.islice(able, number))
    assert found, f"no candidate of {algorithm.name} can run {layer} on {device.name}"
    return found


def check_guarded(
    algorithm: Algorithm, layer: ConvLayer, device: CPU, arrays: tuple[Any, ...], names: Collection[str] | None = None
) -> int:
    """Check candidates that can run, those named or some, against the oracle, guards on either side.

    Returns how many there were.
    """
    offered = algorithm.all(layer, device)
    asked = drawn(offered) if names is None else [c for c in offered if str(c) in names]
    able = (c for c in asked if not algorithm.why_not(layer, device, c.params))
    chosen = list(itertools.islice(able, 4 if names is None else None))
    if not chosen:
        return 0
    want, magnitude = reference.convolve(layer, *arrays), reference.magnitude(layer, *arrays)
    for candidate in chosen:
        for side in ("before", "after"):
            got = run_guarded(algorithm, layer, device, candidate, arrays, side)
            error = reference.error(got, want, magnitude)
            bound = allowed(algorithm, layer, candidate.params, want, magnitude)
            assert error <= bound, (
                f"{candidate} on {layer}, {device.name}, guards {side}: error {error:.2e}, allowed {bound:.2e}, "
                f"{_worst(got, want)}"
            )
    return len(chosen)


def _worst(got: Any, want: Any) -> str:
    """Where an output is furthest from what it should be, and how many of its numbers are none."""
    off = np.abs(got.astype(np.float64) - want)
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    lost = int(np.count_nonzero(~np.isfinite(off)))
    return f"most at {tuple(map(int, at))}: {got[at]} and not {want[at]}; {lost} of {off.size} are not finite"


def check_candidate(
    algorithm: Algorithm, layer: ConvLayer, params: Params, device: CPU | None = None, side: str = "after"
) -> float:
    """Check one candidate, which can run, against the oracle, guards on one side; its error."""
    device = device or CPU.current()
    assert algorithm.why_not(layer, device, params) == []
    arrays = operands(layer)
    got = run_guarded(algorithm, layer, device, Candidate(algorithm.name, tuple(params.items())), arrays, side)
    want, magnitude = reference.convolve(layer, *arrays), reference.magnitude(layer, *arrays)
    error = reference.error(got, want, magnitude)
    assert error <= allowed(algorithm, layer, params, want, magnitude), f"{params} on {layer}"
    return error
