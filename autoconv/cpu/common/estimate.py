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


def step(machine: Machine, unit: str, layer: ConvLayer, products: float, loads: float) -> float:
    """Seconds of one thread for so many vectors of multiply-adds, and for loading what they take from the first cache.

    Parameters
    ----------
    machine : Machine
    unit : str
        The instruction set.
    layer : ConvLayer
    products, loads : float
        Vectors.

    Returns
    -------
    float
    """
    accumulator = layer.accumulator
    nbytes = machine_vector(unit)
    multiply = machine.multiply_adds(unit, accumulator.name, nbytes // accumulator.itemsize)
    return max(products / multiply, loads / machine.loads(nbytes))


def machine_vector(unit: str) -> int:
    """Bytes of a vector."""
    from autoconv.cpu.codegen.ir import VECTOR_BYTES

    return VECTOR_BYTES[unit]


def filters_from_memory(layer: ConvLayer, machine: Machine, nbytes: float) -> float:
    """Seconds in which cold filters, packed to so many bytes, come from memory."""
    return nbytes / machine.memory


def operands_once(layer: ConvLayer, machine: Machine, *, past: bool = False) -> float:
    """Seconds in which a warm input, or both of a gradient's operands, is read once, and the output written once.

    Parameters
    ----------
    layer : ConvLayer
    machine : Machine
    past : bool
        Whether the output goes past the caches.

    Returns
    -------
    float
    """
    written = math.prod(layer.output_shape) * layer.itemsize
    read = layer.bytes - written - (0 if layer.direction == "wgrad" else math.prod(layer.w_shape) * layer.itemsize)
    part = (read + written) / machine.threads
    return machine.reading(read, part) + machine.writing(written, part, past=past)
