"""Depthwise convolution of small planes, each one run of pixels without regard to its rows.

Where the output has as many columns as the input, output `o` of a plane sees input `o + shift`, through every tap one
shift, wherever that lies inside the image. So a vector of outputs, of whatever rows, is a sum of vectors of the input
as it lies in memory, of which masked loads leave out the pixels that are padding: nothing is copied, and of rows
shorter than a vector no lane is idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, LINE, VECTOR_BYTES, Function, Module, Value
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.estimate import operands_once, side_by_side
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.cpu.depthwise.geometry import planes_of_task
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

MOST_PRODUCTS = 512  # vectors of a plane by taps, which are all written out


class DepthwiseFlat(GeneratedAlgorithm):
    """Vectors of outputs of small planes in NCHW, through every tap at once.

    Source: as `depthwise`; that a plane may be a single row of pixels, is ours.
    """

    name = "depthwise.flat"
    directions = ("fwd", "dgrad")
    layouts = ("NCHW",)
    groupings = ("depthwise",)
    exact = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [{}]

    def unsupported(self, layer: ConvLayer) -> list[str]:
        return super().unsupported(layer) or _uneven(layer)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if (products := _products(layer, device)) > MOST_PRODUCTS:
            return [f"vectors of a plane by taps: expected at most {MOST_PRODUCTS}, written out, got {products}"]
        return []

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return 0

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """Every product loads its pixels, of which some vectors, and of the widest nearly all, lie in two lines."""
        machine, size = device.machine, layer.accumulator.itemsize
        nbytes = VECTOR_BYTES[device.instruction_set]
        products = math.prod(layer.output_shape[:2]) * _products(layer, device)
        multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, nbytes // size)
        loads = products * (1 + nbytes / LINE)
        computed = max(products / multiply, loads / machine.loads(nbytes)) / machine.threads
        return side_by_side(computed, operands_once(layer, machine)) + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, device.threads)


def _uneven(layer: ConvLayer) -> list[str]:
    """Every reason why an output does not see one shift of the input through a tap."""
    if layer.stride != (1, 1):
        return [f"stride: expected 1x1, got {'x'.join(map(str, layer.stride))}"]
    (problem,) = correlations(layer)
    if problem.C > 1:
        return [f"dgrad: expected one filter for each channel, got {problem.C}"]
    columns = problem.columns
    if columns.count != columns.size:
        return [f"columns: expected as many of the output as of the input, got {columns.count} and {columns.size}"]
    return []


def _products(layer: ConvLayer, device: CPU) -> int:
    """Vectors of a plane by taps."""
    lanes = VECTOR_BYTES[device.instruction_set] // layer.accumulator.itemsize
    return math.ceil(math.prod(layer.output_shape[2:]) / lanes) * layer.R * layer.S


def emit(instruction_set: str, layer: ConvLayer, threads: int) -> Module:
    """`run` for a layer."""
    m = Module(instruction_set)
    (problem,) = correlations(layer)
    planes = problem.N * problem.groups * problem.K
    together = planes_of_task(planes, threads)
    element = DTYPES[layer.dtype]
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, w, out, bias, residual, _ = operands(k, context, *[element] * 5)
    first = index * together
    with k.loop(first, k.min(first + together, planes)) as plane:
        n, channel = plane // (problem.groups * problem.K), plane % (problem.groups * problem.K)
        group = channel // problem.K
        source = x + n * problem.input.image + group * problem.input.group
        filters = w + group * problem.filters.group + channel % problem.K * problem.filters.k
        place = n * problem.output.image + channel * problem.output.channel
        _plane(k, layer, problem, source, filters, (out + place, residual + place, bias + channel))
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-planes // together))
    return m


def _plane(
    k: Function,
    layer: ConvLayer,
    problem: Correlation,
    source: Value,
    filters: Value,
    finish: tuple[Value, Value, Value],
) -> None:
    """One plane of the output."""
    rows, columns, strides = problem.rows, problem.columns, problem.filters
    lanes, pixels = k.module.lanes(DTYPES[layer.dtype]), rows.count * columns.count
    epilogue, (out, residual, bias) = Epilogue.of(layer), finish
    taps = list(itertools.product(range(len(rows.taps)), range(len(columns.taps))))
    weights = {
        (r, s): k.broadcast(filters + (rows.taps[r] * strides.r + columns.taps[s] * strides.s), lanes) for r, s in taps
    }
    b = epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias)
    for start in range(0, pixels, lanes):
        places = [divmod(o, columns.count) for o in range(start, min(start + lanes, pixels))]
        total = k.zero(weights[taps[0]].type.scalar, lanes)
        for r, s in taps:
            inside = [rows.sees(p, r) and columns.sees(q, s) for p, q in places] + [False] * (lanes - len(places))
            if any(inside):
                shift = (rows.offset + rows.dilation * r) * columns.size + columns.offset + columns.dilation * s
                seen = k.load(source + (start + shift), lanes, mask=k.mask_of(inside))
                total = k.fma(weights[r, s], seen, total)
        width = len(places)
        plus = load_range(k, residual + start, lanes, 0, width) if epilogue.residual else None
        store_range(k, epilogue.apply(k, total, b, plus), out + start, 0, width)
