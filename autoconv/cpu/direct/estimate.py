"""How long direct convolution takes: counts of operations and bytes over what the machine was measured to do."""

from __future__ import annotations

import math

from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES
from autoconv.cpu.common.correlation import Correlation, CorrelationAxis
from autoconv.cpu.common.estimate import busiest, operands_once, side_by_side
from autoconv.cpu.common.packing import packed_size
from autoconv.cpu.common.sums import channels_of_sum, sums_of
from autoconv.cpu.device import CPU
from autoconv.cpu.direct.geometry import DirectBlocking, blockings, cut, padded, tile_runs
from autoconv.cpu.direct.gradients import forward
from autoconv.layer import ConvLayer


def seconds(layer: ConvLayer, device: CPU, params: Params) -> float:
    """Predicted time of a forward pass or a gradient of the input, its filters cold and its input warm.

    Parameters
    ----------
    layer : ConvLayer
    device : CPU
    params : dict

    Returns
    -------
    float
    """
    every = cut(layer, blockings(layer, device, params))
    return sum(_correlation(layer, device, c, b) for c, b in every) + operands_once(layer, device.machine)


def _correlation(layer: ConvLayer, device: CPU, c: Correlation, b: DirectBlocking) -> float:
    """A register tile loads a vector of filters and broadcasts a pixel for every row and column of its products.

    Its filters are read anew by every tile: from memory by the first, then from where a block of them, or those of all
    channels, have stayed. What it sees of the input comes from where the rows of its task are.
    """
    machine, size, taps = device.machine, layer.accumulator.itemsize, len(c.rows.taps) * len(c.columns.taps)
    if not taps:
        return 0.0
    lanes = VECTOR_BYTES[device.instruction_set] // size
    rows, columns = (sum(run.tiles for run in tile_runs(*axis)) for axis in ((c.rows, b.TP), (c.columns, b.TQ)))
    pixels, vectors = c.rows.count * c.columns.count / (rows * columns), b.TK // lanes
    multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, lanes)
    load = machine.loads(lanes * size)
    filters = vectors if b.packed else b.TK  # gathered lane by lane where they lie
    one = max(pixels * vectors / multiply, (pixels + filters) / load)
    blocks = math.ceil(c.K / b.TK)
    steps = c.macs * c.rows.seen * c.columns.seen / (c.K * pixels) * blocks
    visited = math.ceil(c.C / b.BC) * sums_of(b.BC, channels_of_sum(taps))
    tiles = c.N * c.groups * rows * columns * blocks
    sums = tiles * visited * 2 * pixels * vectors / load
    stored = tiles * _stores(layer, b, pixels * vectors) / machine.transforms(lanes * size)
    computed = (steps * one + sums + stored) / machine.threads
    packed = size * packed_size(c, b.TK)
    visits = c.N * rows * columns
    moved = packed / machine.memory + machine.reading(packed * (visits - 1), size * b.BC * taps * b.TK)
    task = layer.itemsize * c.C * c.columns.size * b.rows * b.TP * c.rows.stride
    seen = visits * c.groups * blocks * c.C * _tile_bytes(layer, c, b)
    moved += machine.reading(seen, task)
    tasks = c.N * c.groups * blocks * math.ceil(rows / b.rows)
    return side_by_side(computed, moved) * busiest(tasks, machine.threads) + (machine.barrier or 0.0)


def _stores(layer: ConvLayer, b: DirectBlocking, vectors: float) -> float:
    """What it takes to store a tile's vectors of filters, in those of the machine's probe.

    In NCHW they are transposed, and every filter stores each of its rows by itself.
    """
    return vectors if layer.layout == "NHWC" else vectors + b.TK * b.TP


def _tile_bytes(layer: ConvLayer, c: Correlation, b: DirectBlocking) -> float:
    """What a tile reads of a channel, in whole cache lines where pixels are neighbours."""
    (rows, _), (columns, runs) = _inputs(c.rows, b.TP), _inputs(c.columns, b.TQ)
    if layer.layout == "NHWC":
        return rows * columns * layer.itemsize
    return rows * ((columns - runs) * layer.itemsize + runs * LINE)


def _inputs(axis: CorrelationAxis, outputs: int) -> tuple[int, int]:
    """How many inputs so many outputs see, and in how many runs of neighbours: one, unless taps lie far apart."""
    taps = len(axis.taps)
    together = (outputs - 1) * axis.stride + (taps - 1) * axis.dilation + 1
    apart = taps * ((outputs - 1) * axis.stride + 1)
    return (together, 1) if together <= apart else (apart, taps)


def wgrad_seconds(layer: ConvLayer, device: CPU, params: Params) -> float:
    """Predicted time of a gradient of the filters.

    Neighbouring pixels in lanes take a load for every filter and channel of a tile, and lie across images; channels in
    lanes a load for every vector of them and a broadcast for every filter.

    Parameters
    ----------
    layer : ConvLayer
    device : CPU
    params : dict

    Returns
    -------
    float
    """
    machine, size, c = device.machine, layer.accumulator.itemsize, forward(layer)
    lanes = VECTOR_BYTES[device.instruction_set] // size
    TK, BC = int(params["TK"]), int(params["BC"])
    multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, lanes)
    load = machine.loads(lanes * size)
    filters, channels = min(TK, c.K), min(BC, c.C)
    if params["lanes"] == "pixels":
        vectors = c.macs / lanes * padded(c.columns.count, lanes)
        products, loads = filters * channels, filters + channels * c.columns.stride
    else:
        vectors = c.macs / lanes * padded(c.C, BC)
        products, loads = filters * BC // lanes, filters + BC // lanes
    one = max(products / multiply, loads / load) / products
    taps = len(c.rows.taps) * len(c.columns.taps)
    x, dy = (math.prod(shape) * layer.itemsize for shape in (layer.x_shape, layer.y_shape))
    moved = taps * (x * math.ceil(c.K / TK) / c.rows.stride / c.columns.stride + dy * math.ceil(c.C / BC))
    streams = machine.reading(moved, (x + dy) / max(c.N * c.groups, 1) / machine.threads)
    return side_by_side(vectors * one / machine.threads, streams) + operands_once(layer, machine)
