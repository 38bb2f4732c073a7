"""What threads fetch while they multiply: the next chunk's input, and the lines that this one's output is stored to.

Products leave memory idle, and transforms wait for it where images are larger than the caches. So every register tile
fetches a part of what is transformed, or stored, after it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autoconv.cpu.codegen.ir import Function, Value
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.estimate import rates
from autoconv.cpu.transform.geometry import Tiling
from autoconv.layer import ConvLayer

# Of the products' time, that moving the images has to take: fetching them costs a few hundredths of it, and hides only
# a part of what moving them takes.
SHARE = 0.1


class Region(NamedTuple):
    """Rows of neighbouring elements: `outer` by `inner` of them, each of `length` elements."""

    outer: int
    outer_stride: int
    inner: int
    inner_stride: int
    length: int


def worth_fetching(layer: ConvLayer, tiling: Tiling, machine: Machine) -> bool:
    """Whether a layer's images come from memory, and that takes a time that counts beside the products'.

    Parameters
    ----------
    layer : ConvLayer
    tiling : Tiling
    machine : Machine

    Returns
    -------
    bool
        False also where chunks do not follow one another in the images.
    """
    c = tiling.correlation
    if not c.groups == tiling.rows.residues == tiling.columns.residues == 1:
        return False
    images = layer.bytes - layer.itemsize * math.prod(layer.w_shape)
    vectors = tiling.points * tiling.tile_rows * tiling.columns.tiles * tiling.depth * tiling.k_blocks * tiling.vectors
    products = vectors / (rates(tiling, machine)[0] * machine.threads)
    return images >= machine.caches[2] and images / machine.memory >= SHARE * products


def new_input(tiling: Tiling, x: Value, row: Value) -> Value:
    """Where the region begins that a row of tiles reads and the row above it did not."""
    vertical, strides = tiling.rows, tiling.correlation.input
    seen = max(0, (vertical.r - 1) * vertical.period + vertical.axis.offset)
    n, top = row // vertical.tiles, row % vertical.tiles * (vertical.m * vertical.period)
    return x + (n * strides.image + (top + seen) * strides.row)


def input_region(tiling: Tiling, channels_last: bool) -> Region:
    """The part of the input that a row of tiles reads and the row above it did not."""
    c, height = tiling.correlation, tiling.rows.m * tiling.rows.period
    width = c.columns.size * c.input.column
    if channels_last:
        return Region(1, 0, height, c.input.row, width)
    return Region(c.C, c.input.channel, height, c.input.row, width)


def output(tiling: Tiling, y: Value, row: Value, block: Value) -> Value:
    """Where the region begins that a row of tiles stores for a block of filters."""
    vertical, beside, strides = tiling.rows, tiling.columns.axis, tiling.correlation.output
    n, top = row // vertical.tiles, row % vertical.tiles * (vertical.m * vertical.axis.output_stride)
    place = (top + vertical.axis.output_start) * strides.row + beside.output_start * strides.column
    return y + (n * strides.image + place + block * (tiling.TK * strides.channel))


def output_region(tiling: Tiling, channels_last: bool) -> Region:
    """The part of the output that a row of tiles stores for a block of filters."""
    c, vertical, horizontal = tiling.correlation, tiling.rows.axis, tiling.columns.axis
    filters, height = min(c.K, tiling.TK), tiling.rows.m
    below, beside = vertical.output_stride * c.output.row, horizontal.output_stride * c.output.column
    if channels_last:
        return Region(height, below, horizontal.count, beside, filters)
    return Region(filters, c.output.channel, height, below, horizontal.count * beside)


def fetch_part(k: Function, start: Value, region: Region, part: Value, parts: int, line: int, write: bool) -> None:
    """Fetch one of so many parts of a region, to read or to write it; `line` elements are a cache line."""
    rows, lines = region.outer * region.inner, -(-region.length // line)
    pieces = max(1, min(lines, parts // rows))  # of a row
    together, each = -(-rows // parts), -(-lines // pieces)
    first, piece = part // pieces * together, part % pieces
    with k.loop(first, k.min(first + together, rows)) as row:
        place = row // region.inner * region.outer_stride + row % region.inner * region.inner_stride
        at = start + (place + piece * (each * line))
        for n in range(each):
            k.prefetch(at + n * line, write=write, locality=2)
