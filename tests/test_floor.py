"""Every algorithm of the CPU against the oracle, over the whole space of layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import EDGES, TAILS, edge, layers, operands

from autoconv import reference
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu.device import CPU
from autoconv.layer import DIRECTIONS, LAYOUTS, ConvLayer

DEVICE = CPU.current()
GUARD = 4096  # bytes on either side of the output and of the workspace
POISON = 0xFF  # NaN in every floating-point type


class SmallCaches(CPU):
    """This machine with caches so small that even test layers are cut into blocks."""

    @property
    def facts(self) -> dict[str, Any]:  # type: ignore[override]
        return super().facts | {"l1_bytes": 256, "l2_bytes": 2048, "l3_bytes": 16384}


SMALL = SmallCaches(threads=1, instruction_set=DEVICE.instruction_set)


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
    """The candidate's output, after checks that it kept to its buffers and left its inputs alone."""
    kernel = algorithm.build(layer, device, candidate.params)
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


def check(layer: ConvLayer, seed: int = 0, device: CPU = DEVICE) -> None:
    """Every candidate agrees with the oracle within its bound, and with itself; or says why it cannot run."""
    arrays = operands(layer, seed)
    want, magnitude = reference.convolve(layer, *arrays), reference.magnitude(layer, *arrays)
    for algorithm in device.algorithms:
        for candidate in algorithm.all(layer, device):
            reasons = algorithm.why_not(layer, device, candidate.params)
            assert isinstance(reasons, list)
            assert all(isinstance(reason, str) and reason for reason in reasons)
            if reasons:
                continue
            got = launch(algorithm, layer, candidate, arrays, device)
            error = reference.error(got, want, magnitude)
            bound = algorithm.bound(layer, candidate.params)
            assert error <= bound, f"{candidate} on {layer}: error {error:.2e}, allowed {bound:.2e}"
            if algorithm.deterministic:
                again = launch(algorithm, layer, candidate, arrays, device)
                assert got.tobytes() == again.tobytes(), f"{candidate} on {layer}: two runs differ"


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    for layout in LAYOUTS:
        for direction in DIRECTIONS:
            check(edge(name, layout=layout, direction=direction))


@pytest.mark.parametrize("name", EDGES)
def test_edges_in_blocks(name: str) -> None:
    for layout in LAYOUTS:
        for direction in DIRECTIONS:
            check(edge(name, layout=layout, direction=direction), device=SMALL)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", ["tails", "grouped", "depthwise", "pointwise", "five by five"])
def test_tails(name: str, tail: str) -> None:
    for layout in LAYOUTS:
        for dtype in ("float32", "float16"):
            check(edge(name, layout=layout, dtype=dtype, **TAILS[tail]))


@settings(max_examples=150)
@given(layer=layers(), seed=st.integers(0, 2**32 - 1), device=st.sampled_from([DEVICE, SMALL]))
def test_any_layer(layer: ConvLayer, seed: int, device: CPU) -> None:
    check(layer, seed, device)


@pytest.mark.stress
@pytest.mark.timeout(3600)
@settings(max_examples=5000, derandomize=False)
@given(layer=layers(), seed=st.integers(0, 2**32 - 1), device=st.sampled_from([DEVICE, SMALL]))
def test_any_layer_many_times(layer: ConvLayer, seed: int, device: CPU) -> None:
    check(layer, seed, device)
