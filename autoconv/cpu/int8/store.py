"""What follows the sums of a quantised layer: their offsets and scales, rounding, and the store."""

from __future__ import annotations

import numpy as np

from autoconv.common.types import INTEGERS
from autoconv.cpu.codegen.ir import Function, Module, Type, Value, f32, i8, i32, i64, ptr, vec
from autoconv.cpu.common.functions import MAGIC, MAGIC_BITS
from autoconv.cpu.common.lanes import store_range
from autoconv.cpu.int8.geometry import Panel
from autoconv.layer import ConvLayer

OUTPUTS: dict[str, Type] = {"int32": i32, "float32": f32, "uint8": i8, "int8": i8}


def emit_store(m: Module, panel: Panel, element: Type) -> Function:
    """`store(sums, offsets and scales, out, filters left, zero point)`: a row of outputs of a block of filters."""
    k = m.function("store", ptr(i32), ptr(i32), ptr(element), i64, i32, internal=True)
    (_channels_last if panel.layer.layout == "NHWC" else _channels_first)(k, panel)
    return k


def finished(k: Function, layer: ConvLayer, v: Value, scale: Value, zero: Value) -> Value:
    """What `Quantization` makes of whole sums, bias and all, in the lanes of the output's type."""
    if layer.activation == "relu":
        v = k.max(v, k.zero(i32, v.type.lanes))
    if layer.output_dtype == "int32":
        return v
    lanes = v.type.lanes
    scaled = k.cast(v, vec(f32, lanes)) * scale
    if layer.output_dtype == "float32":
        return scaled
    limits = np.iinfo(INTEGERS[layer.output_dtype])
    for bound, lower in ((limits.min, True), (limits.max, False)):
        limit = k.splat(k.cast(bound - zero, f32), lanes)
        scaled = k.select(scaled < limit if lower else scaled > limit, limit, scaled)
    bits = k.bits(scaled + MAGIC, v.type)
    return bits + k.splat(zero - MAGIC_BITS, lanes)


def narrowed(k: Function, layer: ConvLayer, v: Value) -> Value:
    """As it is stored."""
    return k.cast(v, vec(i8, v.type.lanes)) if layer.output_dtype in INTEGERS else v


def _finished(k: Function, panel: Panel, sums: Value, first: int | Value) -> Value:
    """A vector of filters from `first` on, as it is stored, in the lanes of the output's type."""
    lanes = panel.cut.lanes
    meanings, zero = k.args[1], k.args[4]
    scale = k.load(k.bits(meanings + first + panel.cut.TK, ptr(f32)), lanes)
    return finished(k, panel.layer, sums + k.load(meanings + first, lanes), scale, zero)


def _channels_last(k: Function, panel: Panel) -> None:
    sums, _, out, left, _ = k.args
    lanes, TK, K, length = panel.cut.lanes, panel.cut.TK, panel.layer.K, panel.stored[1]
    for first in range(0, TK, lanes):
        with k.if_(left > first), k.loop(0, length) as q:
            v = narrowed(k, panel.layer, _finished(k, panel, k.load(sums + q * TK + first, lanes), first))
            mask = None if panel.K % lanes == 0 else k.mask(left - first, lanes)
            k.store(v, out + q * K + first, mask=mask)


def _channels_first(k: Function, panel: Panel) -> None:
    """Blocks of as many outputs as filters, transposed."""
    sums, _, out, left, _ = k.args
    layer, lanes, TK, length = panel.layer, panel.cut.lanes, panel.cut.TK, panel.stored[1]

    def block(q: int | Value, first: Value, width: int) -> None:
        rows = [k.load(sums + (k.i64(q) + min(n, width - 1)) * TK + first, lanes) for n in range(lanes)]
        for n, v in enumerate(k.transpose([_finished(k, panel, row, first) for row in rows])):
            with k.if_(left > first + n):
                store_range(k, narrowed(k, panel.layer, v), out + (first + n) * (layer.P * layer.Q) + q, 0, width)

    with k.loop(0, TK, lanes) as first:
        if length >= lanes:
            with k.loop(0, length, lanes) as q:
                block(k.min(q, length - lanes), first, lanes)
        else:
            block(0, first, length)
