"""How the emulator runs the cases of `autoconv.bench.gpu.cases`, and others; how a run is checked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest
from layers import EDGES, edge, operands
from simt.emulator import Emulated, fenced

from autoconv import registry
from autoconv.algorithm import Algorithm, Params
from autoconv.bench.gpu.cases import SCHEDULES, Case, runnable, variants
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.tuning.reference import convolve, error, magnitude

LARGEST_PADDING = 256  # bytes at the end of packed filters
DEVICE = Emulated(capability=90)
OURS = tuple(algorithm for algorithm in registry.algorithms(DEVICE) if algorithm.vendor is None)

Row = TypeVar("Row")


def named(name: str) -> Algorithm:
    """One of ours."""
    return next(algorithm for algorithm in OURS if algorithm.name == name)


def only(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave a CUDA device these of our algorithms alone."""
    table, found = registry._table, tuple(map(named, names))
    patch.setattr(registry, "_table", lambda kind: found if kind == "cuda" else table(kind))


def on_device(device: Emulated, array: Any) -> Any:
    if array is None:
        return None
    copy = device.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def run(device: Emulated, algorithm: Algorithm, layer: ConvLayer, params: Params, given: Any = None) -> Any:
    """The output, after checking that nothing else was written."""
    a, b, bias, residual = (on_device(device, array) for array in given or operands(layer))
    kernel = algorithm.build(layer, device, params)
    assert kernel.workspace_bytes == algorithm.workspace_bytes(layer, device, params)
    assert kernel.packed_bytes == algorithm.packed_bytes(layer, device, params)
    workspace, out = device.buffer(kernel.workspace_bytes), device.empty(layer.output_shape, layer.numpy_dtype)
    written = [workspace, out]
    if kernel.packed_bytes:
        packed = device.buffer(kernel.packed_bytes)
        kernel.pack(b, packed)
        assert (packed[-LARGEST_PADDING:] != 0xFF).any(), f"{algorithm.name} asks for more than it packs"
        written.append(packed)
        b = packed
    kernel.run(a, b, out, bias, residual, workspace)
    assert all(map(fenced, written)), f"{algorithm.name} writes outside its arrays"
    return out


def checker(algorithm: Algorithm, layer: ConvLayer, params: Params) -> Callable[[Emulated], None]:
    """What checks a case on a device; the reference is computed once."""
    given = operands(layer)
    wanted, scale = convolve(layer, *given), magnitude(layer, *given)

    def check_on(device: Emulated) -> None:
        found = error(run(device, algorithm, layer, params, given), wanted, scale)
        assert found <= algorithm.bound(layer, params), f"{algorithm.name} {params} on {layer}: error {found:.2g}"

    return check_on


def check(device: Emulated, algorithm: Algorithm, layer: ConvLayer, params: Params) -> None:
    checker(algorithm, layer, params)(device)


def pairwise(rows: Iterable[Row], values: Callable[[Row], tuple[Hashable, ...]], seed: int = 0) -> list[Row]:
    """Of the rows, in some random order, those in which two of their values meet for the first time."""
    shuffled, found = list(rows), []
    met: set[Hashable] = set()
    random.Random(seed).shuffle(shuffled)
    for row in shuffled:
        pairs = set(itertools.combinations(enumerate(values(row)), 2))
        if not pairs <= met:
            met |= pairs
            found.append(row)
    return found


def candidate_cases(algorithm: Algorithm) -> list[Case]:
    """Of all candidates of all edges so many that every two of what a case is made of meet where they can."""
    rows = [
        ((name, direction, layout, dtype, tuple(params.items())), layer, params)
        for name, direction, layout, dtype in itertools.product(EDGES, DIRECTIONS, LAYOUTS, DTYPES)
        for layer in (edge(name, direction=direction, layout=layout, dtype=dtype),)
        for params in runnable(algorithm, layer)
    ]
    chosen = pairwise(rows, lambda row: row[0])
    return [(layer, params, turn % SCHEDULES) for turn, (_, layer, params) in enumerate(chosen)]


def kinds(algorithm: Algorithm) -> list[tuple[ConvLayer, Params]]:
    """One small case to each direction; of a family's candidates the last, with the smallest tile."""
    found = []
    for name, direction in (("remainders", "fwd"), ("strided", "dgrad"), ("grouped", "wgrad"), ("depthwise", "wgrad")):
        for layer in (*variants(name, direction=direction), edge(name, direction=direction, dtype="float16")):
            if params := runnable(algorithm, layer):
                found.append((layer, params[-1]))
                break
    return found or [(edge("depthwise"), runnable(algorithm, edge("depthwise"))[-1])]
