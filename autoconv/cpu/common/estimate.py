"""What estimates of every family are made of: counts over the rates of the measured machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cpu.machine.model import Machine

OVERLAP = 0.5  # the part of two kinds of work side by side by which the shorter one is hidden
PAGE = 4096


def side_by_side(first: float, second: float) -> float:
    """Seconds of computing and of moving what is computed with, which go on together as far as they can.

    Parameters
    ----------
    first, second : float

    Returns
    -------
    float
    """
    return max(first, second) + (1 - OVERLAP) * min(first, second)


def busiest(tasks: int, threads: int) -> float:
    """How many times its fair share the busiest thread does.

    Parameters
    ----------
    tasks, threads : int

    Returns
    -------
    float
    """
    return math.ceil(tasks / threads) * threads / tasks


def meeting(machine: Machine, party: int) -> float:
    """Seconds in which so many of the threads come together and wait for one another: as many for each but the first.

    Parameters
    ----------
    machine : Machine
    party : int

    Returns
    -------
    float
    """
    return (machine.barrier or 0.0) * (party - 1) / max(machine.threads - 1, 1)


def operands_once(layer: ConvLayer, machine: Machine, *, past: bool = False, lines: float = 1.0) -> float:
    """Seconds in which a warm input, or both of a gradient's operands, is read once, and the output written once.

    Parameters
    ----------
    layer : ConvLayer
    machine : Machine
    past : bool
        Whether the output goes past the caches, and so drains while others are read.
    lines : float
        How many lines are read for each that the operands fill.

    Returns
    -------
    float
    """
    written = math.prod(layer.output_shape) * layer.itemsize
    read = layer.bytes - written - (0 if layer.direction == "wgrad" else math.prod(layer.w_shape) * layer.itemsize)
    kept = read if past else read + written
    part = max(kept / machine.threads, 2 * machine.caches[1])  # other threads had it last
    first, second = lines * machine.reading(read, part), machine.writing(written, part, past=past)
    return side_by_side(first, second) if past else first + second
