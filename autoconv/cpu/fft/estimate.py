"""How long a Fourier convolution takes: counts of operations over what the machine was measured to do."""

from __future__ import annotations

import math

from autoconv.cpu.fft.geometry import FourierTiling
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.estimate import Counts, gathered, rates
from autoconv.cpu.transform.geometry import split_evenly
from autoconv.cpu.transform.matrix_unit import MatrixTiling, multiplied, splitting

PRODUCTS = 3  # of real numbers, for one of complex numbers


def counts(tiling: FourierTiling, machine: Machine) -> Counts:
    """What a correlation consists of.

    Parameters
    ----------
    tiling : FourierTiling
    machine : Machine

    Returns
    -------
    Counts
    """
    forward, inverse = _transformed(tiling)
    if isinstance(tiling, MatrixTiling):
        return Counts(forward + splitting(tiling), inverse, multiplied(tiling, machine))
    return Counts(forward, inverse, _products(tiling, machine))


def _spectrum(length: int) -> float:
    """What the transform of so many complex numbers takes, in vectors of the machine's probe.

    `5 n log2(n)` operations (Cooley and Tukey, 1965), and two instructions to load and store each of the `2 n` numbers;
    a vector of the probe takes five instructions.
    """
    return length * (math.log2(length) + 0.8)


def _transformed(tiling: FourierTiling) -> tuple[float, float]:
    """Vectors of either side: columns and rows of every tile, two real columns in a complex one."""
    down, across = map(_spectrum, tiling.lengths)
    rows, tiles = tiling.lengths[0] / 2, tiling.columns.tiles
    forward = gathered(tiling) + tiling.columns.span / 2 * down + tiles * rows * across
    inverse = tiles * (rows * across + tiling.kept / 2 * down) + tiling.rows.m * tiling.out_pitch
    inputs = tiling.k_blocks if tiling.channelwise else tiling.c_blocks
    rows_of_tiles = tiling.correlation.groups * tiling.tile_rows
    return rows_of_tiles * inputs * forward, rows_of_tiles * tiling.k_blocks * tiling.vectors * inverse


def _products(tiling: FourierTiling, machine: Machine) -> float:
    """Seconds of one thread that did all multiply-adds, its operands in the first cache."""
    multiply, load = rates(tiling, machine)
    spent = 0.0
    for chunks, rows in tiling.chunk_sizes:
        for count, size in split_evenly(rows * tiling.columns.tiles, tiling.most_tiles):
            step = PRODUCTS * max(size / multiply, (size + 1) / load)
            spent += chunks * count * (tiling.depth * step + 4 * size / load)
    return tiling.correlation.groups * tiling.frequencies * tiling.k_blocks * tiling.vectors * spent
