"""What the emulator runs of each algorithm: layers, parameters, schedules; and how a run is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from layers import EDGES, TAILS, edge, operands
from simt.emulator import Emulated, fenced

from autoconv.algorithm import Algorithm, Params
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.reference import convolve, error, magnitude

SCHEDULES = 16
DEVICE = Emulated(capability=90)


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
        written.append(packed)
        b = packed
    kernel.run(a, b, out, bias, residual, workspace)
    assert all(map(fenced, written)), f"{algorithm.name} writes outside its arrays"
    return out


def check(device: Emulated, algorithm: Algorithm, layer: ConvLayer, params: Params) -> None:
    given = operands(layer)
    out = run(device, algorithm, layer, params, given)
    found = error(out, convolve(layer, *given), magnitude(layer, *given))
    assert found <= algorithm.bound(layer, params), f"{algorithm.name} {params} on {layer}: error {found:.2g}"


def runnable(algorithm: Algorithm, layer: ConvLayer, device: Emulated = DEVICE) -> list[Params]:
    return [p for p in algorithm.candidates(layer, device) if not algorithm.why_not(layer, device, p)]


def variants(name: str, **choices: Any) -> Iterator[ConvLayer]:
    """The edge, and what is nearest to it that kernels with narrower tastes can take."""
    groups = EDGES[name].get("groups", 1)
    wide = {"C": 8 * groups, "K": 16 * groups, "layout": "NHWC"}
    yield edge(name, **choices)
    yield edge(name, **(choices | {"dtype": "float32"}))
    yield edge(name, **(choices | wide))
    yield edge(name, **(choices | wide | {"dtype": "float16", "N": 3}))
    yield edge(name, **(choices | wide | {"dtype": "float32"}))


def cases(algorithm: Algorithm) -> Iterator[tuple[ConvLayer, Params, int]]:
    """Each edge in every direction, the other choices taken in turn so that pairs of them meet."""
    turn = 0
    for (i, name), (j, direction) in itertools.product(enumerate(EDGES), enumerate(DIRECTIONS)):
        tail = list(TAILS.values())[i % 4] if direction == "fwd" else {}
        choices = {"dtype": list(DTYPES)[(i + 2 * j) % 4], "layout": LAYOUTS[(i // 4 + j) % 2]}
        for layer in variants(name, direction=direction, **choices, **tail):
            if params := runnable(algorithm, layer):
                yield layer, params[turn % len(params)], turn % SCHEDULES
                turn += 1
                break


def kinds(algorithm: Algorithm) -> list[tuple[ConvLayer, Params]]:
    """One small case to each direction; of a family's candidates the last, with the smallest tile."""
    found = []
    for name, direction in (("tails", "fwd"), ("strided", "dgrad"), ("grouped", "wgrad"), ("depthwise", "wgrad")):
        for layer in variants(name, direction=direction):
            if params := runnable(algorithm, layer):
                found.append((layer, params[-1]))
                break
    return found or [(edge("depthwise"), runnable(algorithm, edge("depthwise"))[-1])]
