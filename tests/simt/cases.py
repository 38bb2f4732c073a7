"""How the emulator runs the cases of `autoconv.bench.gpu`, and others; how a run is checked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
import pytest
from guards import allowed
from layers import EDGES, edge, operands
from simt.emulator import Emulated, fenced

from autoconv import registry
from autoconv.algorithm import Algorithm, Params
from autoconv.bench.gpu.cases import SCHEDULES, Case, runnable, variants
from autoconv.bench.gpu.networks import ERROR, difference, drawn, graph_of
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.libraries.algorithm import epilogue_unit
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.networks.graph import Graph
from autoconv.networks.reference import evaluate
from autoconv.networks.run.cuda_steps import CudaStepMaker
from autoconv.networks.run.memory import Views
from autoconv.networks.run.steps import Call, Ref, Scratch
from autoconv.tuning.reference import convolve, error, magnitude

LARGEST_PADDING = 256  # bytes at the end of packed filters
DEVICE = Emulated(capability=90)
# Of which every line begins at a multiple of sixteen bytes, in NCHW.
POINTWISE = ConvLayer(N=2, C=8, H=6, W=12, K=16, R=1, S=1, dtype="float16")
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
        assert found <= allowed(algorithm, layer, params, wanted, scale), (
            f"{algorithm.name} {params} on {layer}: error {found:.2g}"
        )

    return check_on


def check(device: Emulated, algorithm: Algorithm, layer: ConvLayer, params: Params) -> None:
    checker(algorithm, layer, params)(device)


def calls_of(graph: Graph, device: Emulated) -> tuple[Call, ...]:
    """What a device is asked to do for a network's one node."""
    return CudaStepMaker(graph, Views(graph, device.alignment), device).step(graph.nodes["y"]).calls


def units_of(name: str) -> tuple[Unit, ...]:
    """The kernels of an operator."""
    return tuple(call.program for call in calls_of(graph_of(name), DEVICE) if isinstance(call.program, Unit))


def computed(graph: Graph, inputs: dict[str, np.ndarray], device: Emulated) -> np.ndarray:
    """What the kernels of a network's one node make of arrays, after checking that nothing else is written."""
    arrays = {name: device.empty(t.shape, np.dtype(t.dtype)) for name, t in graph.types.items()}
    for name, array in inputs.items():
        arrays[name][...] = array
    for call in calls_of(graph, device):
        scratch = device.buffer(call.workspace_bytes)
        found: list[Any] = [
            arrays[one.name] if isinstance(one, Ref) else scratch if isinstance(one, Scratch) else one
            for one in call.operands
        ]
        (device.load(call.program) if isinstance(call.program, Unit) else call.program)(*found)
        assert fenced(scratch)
    assert all(map(fenced, arrays.values()))
    for name, array in inputs.items():
        np.testing.assert_array_equal(arrays[name], array)
    return np.asarray(arrays["y"])


def operator_checker(name: str, not_finite: bool = False) -> Callable[[Emulated], None]:
    """What checks an operator on a device."""
    graph = graph_of(name)
    inputs = drawn(graph, not_finite)
    with np.errstate(all="ignore"):
        expected = evaluate(graph, inputs)["y"]

    def check_on(device: Emulated) -> None:
        found = computed(graph, inputs, device)
        assert found.dtype == graph.types["y"].dtype
        assert difference(found, expected) <= ERROR

    return check_on


def epilogue_checker(layer: ConvLayer) -> Callable[[Emulated], None]:
    """What checks, on a device, the kernel that ends what a library's convolution begins."""
    _, _, bias, residual = operands(layer)
    sums = np.random.default_rng(0).standard_normal(layer.output_shape).astype(layer.numpy_dtype)
    wanted = np.maximum(sums + residual + (bias if layer.layout == "NHWC" else bias[:, None, None]), 0)

    def check_on(device: Emulated) -> None:
        out, *others = (on_device(device, array) for array in (sums, bias, residual))
        device.load(epilogue_unit(layer))(out, *others)
        assert fenced(out)
        assert difference(out, wanted) <= ERROR

    return check_on


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
    others = edge("depthwise"), edge("pointwise"), POINTWISE, edge("valid", direction="wgrad")
    return found or [(layer, params[-1]) for layer in others if (params := runnable(algorithm, layer))]
