"""How long a Winograd convolution takes: counts of operations over what the machine was measured to do."""

from __future__ import annotations

import functools

from autoconv.cpu.common.estimate import side_by_side
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.estimate import Counts, gathered, rates, vector
from autoconv.cpu.transform.geometry import split_evenly
from autoconv.cpu.transform.matrix_unit import MatrixTiling, multiplied, splitting
from autoconv.cpu.winograd.geometry import WinogradTiling
from autoconv.cpu.winograd.gradients_geometry import WgradTiling


def counts(tiling: WinogradTiling, machine: Machine) -> Counts:
    """What a correlation consists of.

    Parameters
    ----------
    tiling : WinogradTiling
    machine : Machine

    Returns
    -------
    Counts
    """
    forward, inverse = _input_vectors(tiling), _output_vectors(tiling)
    if isinstance(tiling, MatrixTiling):
        return Counts(forward + splitting(tiling), inverse, multiplied(tiling, machine))
    return Counts(forward, inverse, _products(tiling, machine))


@functools.cache
def effort(tile: int) -> float:
    """What a point of a tile takes, in vectors of the machine's probe, into each of which five instructions go.

    Half of a tile's points are combined into each, as points in pairs of sign share their halves.

    Parameters
    ----------
    tile : int

    Returns
    -------
    float
    """
    return (tile / 2 + 2) / 5


def _input_vectors(tiling: WinogradTiling) -> float:
    """Vectors of the input's side: gathered, transformed along columns, and along rows."""
    rows, columns = tiling.rows, tiling.columns
    down = columns.span * rows.tile * effort(rows.tile) if rows.tile > 1 else 0
    across = columns.tiles * tiling.points * effort(columns.tile)
    return tiling.correlation.groups * tiling.tile_rows * tiling.c_blocks * (gathered(tiling) + down + across)


def _output_vectors(tiling: WinogradTiling) -> float:
    """Vectors of the output's side: transformed along columns, along rows, and stored."""
    rows, columns = tiling.rows, tiling.columns
    down = columns.tiles * tiling.points * effort(rows.tile)
    across = columns.tiles * rows.m * columns.tile * effort(columns.tile)
    stored = rows.m * tiling.out_pitch
    filters = tiling.k_blocks * tiling.vectors
    return tiling.correlation.groups * tiling.tile_rows * filters * (down + across + stored)


def _products(tiling: WinogradTiling, machine: Machine) -> float:
    """Seconds of one thread that did all multiply-adds, its operands in the first cache."""
    multiply, load = rates(tiling, machine)
    spent = 0.0
    for chunks, rows in tiling.chunk_sizes:
        for count, size in split_evenly(rows * tiling.columns.tiles, tiling.most_tiles):
            step = max(size * tiling.vectors / multiply, (size + tiling.vectors) / load)
            spent += chunks * count * (tiling.depth * step + 2 * size * tiling.vectors / load)
    return tiling.correlation.groups * tiling.points * tiling.k_blocks * spent


def wgrad_seconds(tiling: WgradTiling, machine: Machine) -> float:
    """Predicted time of a gradient of the filters.

    Parameters
    ----------
    tiling : WgradTiling
    machine : Machine

    Returns
    -------
    float
    """
    forward, threads, size = tiling.forward, machine.threads, tiling.forward.itemsize
    groups, points, chunks = forward.correlation.groups, forward.points, forward.chunks
    rows, columns = forward.rows, forward.columns
    down = rows.m * columns.tiles * columns.m + columns.tiles * columns.m * rows.tile * effort(rows.tile)
    across = columns.tiles * points * effort(columns.tile)
    turned = _input_vectors(forward) + groups * forward.tile_rows * tiling.k_vectors * (down + across)
    multiply, load = rates(forward, machine)
    vectors = tiling.channel_blocks * tiling.vectors
    blocks = tiling.filter_blocks * sum(
        count * (forward.tile_rows * columns.tiles * max(n * tiling.vectors / multiply, (n + tiling.vectors) / load))
        for count, n in tiling.register_tiles
    )
    sums = tiling.filter_blocks * tiling.BF * vectors
    computed = groups * points * (blocks * tiling.channel_blocks + chunks * sums * 4 / load)
    moved = size * chunks * groups * (tiling.v_size * tiling.filter_blocks + tiling.y_size * tiling.channel_blocks)
    used = size * tiling.slices * (tiling.v_size + tiling.y_size)
    product = side_by_side(computed / threads, moved / machine.read.rate(max(used, 2 * threads * machine.caches[1])))
    finish = groups * sums * tiling.taps * (2 + tiling.slices) / machine.transforms(vector(forward)) / threads
    fresh = machine.writing(tiling.workspace_bytes(), machine.beyond)
    waits = groups * (2 * tiling.steps + 1) * (machine.barrier or 0.0)
    return turned / machine.transforms(vector(forward)) / threads + product + finish + fresh + waits
