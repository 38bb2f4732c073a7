"""Non-temporal stores: past the caches, where the output would not stay in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from autoconv.cpu.codegen.ir import LINE, VECTOR_BYTES, Function, Value, i64
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cpu.device import CPU


def streaming_refusals(layer: ConvLayer, device: CPU) -> list[str]:
    """Reasons against non-temporal stores."""
    reasons = []
    if layer.itemsize < 4:
        reasons.append(f"nt=1: expected float32 or float64, whose vectors are stored whole, got {layer.dtype}")
    size, l2 = math.prod(layer.output_shape) * layer.itemsize, device.machine.caches[1]
    if size < l2:
        reasons.append(f"nt=1: expected an output of at least the L2 cache's {l2} bytes, got {size}")
    return reasons


def nt_values(layer: ConvLayer, device: CPU) -> list[int]:
    """Of the parameter `nt` that a layer's candidates may have: 1 stores past the caches."""
    return [0] if streaming_refusals(layer, device) else [0, 1]


def stream(k: Function, source: Value, out: Value, count: Value) -> None:
    """Copy so many elements, whole cache lines past the caches; what sticks out at the ends, as usual.

    A line written in both ways would cost a read of memory, and more.
    """
    assert source.type.to is not None
    lanes = k.module.lanes(source.type.to)
    size = source.type.to.bytes
    line = LINE // size
    head = k.min((-k.bits(out, i64) & (LINE - 1)) // size, count)
    whole = head + (count - head) // line * line

    def rest(first: int | Value, last: Value) -> None:
        with k.loop(first, last, lanes) as i:
            mask = k.mask(last - i, lanes)
            k.store(k.load(source + i, lanes, mask=mask), out + i, mask=mask)

    rest(0, head)
    with k.loop(head, whole, lanes) as i:
        k.store(k.load(source + i, lanes), out + i, nontemporal=True)
    rest(whole, count)


def launch_streaming(run: Function, out: Value, emit: Callable[[bool], None]) -> None:
    """`emit(True)` where the output is aligned for non-temporal stores, `emit(False)` where it is not."""
    with run.if_((run.bits(out, i64) & (VECTOR_BYTES[run.module.instruction_set] - 1)).eq(0)):
        emit(True)
    with run.else_():
        emit(False)
