"""proto"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Params
from autoconv.cpu.codegen.ir import DTYPES, LINE, Module
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.grid import parts, register_tiles
from autoconv.cpu.gemm_packed.geometry import MOST_TILES, SUMS, PackedGemmBlocking, PlaneTiles, pitch_of, pixels_of, product
from autoconv.layer import ConvLayer

LEVELS = 1


class Product(NamedTuple):
    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...]


ONE = (
    Product((1, 0, 0, 1), (1, 0, 0, 1), (1, 0, 0, 1)),
    Product((0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 1, -1)),
    Product((1, 0, 0, 0), (0, 1, 0, -1), (0, 1, 0, 1)),
    Product((0, 0, 0, 1), (-1, 0, 1, 0), (1, 0, 1, 0)),
    Product((1, 1, 0, 0), (0, 0, 0, 1), (-1, 1, 0, 0)),
    Product((-1, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 1)),
    Product((0, 1, 0, -1), (0, 0, 1, 1), (1, 0, 0, 0)),
)


def kron(x, y):
    # [row][col] each 2x2 -> 4x4
    return tuple(x[2 * r0 + c0] * y[2 * r1 + c1] for r0 in (0, 1) for r1 in (0, 1) for c0 in (0, 1) for c1 in (0, 1))


TWO = tuple(Product(*(kron(p, q) for p, q in zip(x, y))) for x in ONE for y in ONE)


def products_of(levels):
    return ONE if levels == 1 else TWO


class B(NamedTuple):
    TK: int
    TQ: int
    BC: int
    tiles: int
    chunks: int
    threads: int
    levels: int

    @property
    def side(self):
        return 2**self.levels


def share(n, side):
    return -(-n // side)


def tiles_of(problem, TQ, side):
    return PlaneTiles.of(share(pixels_of(problem), side), TQ)


def micropanel_pitch(problem, TQ, side):
    return pitch_of(share(problem.C, side) * TQ)


def thread_bytes(problem, blocking, itemsize):
    n = len(products_of(blocking.levels))
    sums = blocking.tiles * blocking.side**2 * blocking.TK * blocking.TQ
    return LINE + (blocking.tiles * n * micropanel_pitch(problem, blocking.TQ, blocking.side) + sums) * itemsize


def blocks_of(problem, TK, side):
    """sets of blocks"""
    return share(math.ceil(problem.K / TK), side)


def packed_size(problem, blocking):
    n = len(products_of(blocking.levels))
    return problem.groups * blocks_of(problem, blocking.TK, blocking.side) * n * share(problem.C, blocking.side) * blocking.TK


@functools.lru_cache(64)
def grid_of(layer, device, levels):
    problem, itemsize = product(layer), layer.accumulator.itemsize
    m = Module(device.instruction_set)
    lanes = m.lanes(DTYPES[layer.dtype])
    grid = []
    side = 2**levels
    depth = share(problem.C, side)
    for vectors, TQ in register_tiles(device.instruction_set):
        TK = vectors * lanes
        if blocks_of(problem, TK, side) * side * TK >= 1.5 * problem.K:
            continue
        least = device.machine.caches[0] // (8 * TK * itemsize)
        tiles = problem.N * tiles_of(problem, TQ, side).tiles
        fit = max(1, min(MOST_TILES, device.machine.caches[1] // (len(products_of(levels)) * micropanel_pitch(problem, TQ, side) * itemsize)))
        for BC in dict.fromkeys(min(-(-n // m.terms) * m.terms, depth) for n in reversed(parts(depth))):
            if least > BC and BC < depth:
                break
            few = (n for n in reversed(parts(tiles, fit)) if 4 * n >= min(tiles, fit))
            grid += [{"TK": TK, "TQ": TQ, "BC": BC, "panels": math.ceil(tiles / together), "L": levels} for together in few]
    return grid


def blocking_of(layer, device, params):
    problem = product(layer)
    TK, TQ, BC, panels, levels = (int(params[name]) for name in ("TK", "TQ", "BC", "panels", "L"))
    side = 2**levels
    tiles = problem.N * tiles_of(problem, TQ, side).tiles
    blocks = blocks_of(problem, TK, side)
    chunks = 1
    while panels * chunks * problem.groups < 8 * device.threads and chunks * 2 <= blocks:
        chunks *= 2
    return B(TK, TQ, BC, math.ceil(tiles / panels), chunks, device.threads, levels)
