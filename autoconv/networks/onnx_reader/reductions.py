"""ONNX's reductions along axes in terms of ours."""

from __future__ import annotations

import functools
from typing import Literal

from autoconv.common.epilogue.expressions import Expression
from autoconv.networks.normalisation import cast, wide
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.operators.elementwise import FLOATS
from autoconv.networks.operators.pooling import Reduce

Reduction = Literal["max", "mean", "sum"]


def _global_pool(reduction: Reduction, call: Call) -> str:
    return call.add(Reduce(reduction, tuple(range(2, len(call.type().shape)))), call.value(0))


def _axes(call: Call) -> tuple[int, ...]:
    """All axes where none are given; none where the node then is to do nothing."""
    given = call.integers(1, "axes") or (() if call.attribute("noop_with_empty_axes", 0) else None)
    return call.axes(given, len(call.type().shape))


def _kept(call: Call, y: str, axes: tuple[int, ...]) -> str:
    """Without the axes of extent 1 that a reduction leaves, unless they are to stay."""
    if call.attribute("keepdims", 1):
        return y
    return call.reshape(y, [extent for n, extent in enumerate(call.shape_of(y)) if n not in axes])


def _reduce(reduction: Reduction, call: Call) -> str:
    axes = _axes(call)
    return _kept(call, call.add(Reduce(reduction, axes), call.value(0)), axes) if axes else call.value(0)


def _reduce_floats(before: Expression, reduction: Reduction, after: Expression, call: Call) -> str | None:
    """A reduction of a function of each element, and a function of what comes out."""
    axes = _axes(call)
    if not axes or call.type().dtype not in FLOATS:
        return None
    x = wide(call, call.value(0))
    y = call.add(Reduce(reduction, axes), x if before == 0 else call.apply(before, x))
    y = y if after == 0 else call.apply(after, y)
    return cast(call, _kept(call, y, axes), call.type().dtype)


def _log_sum_exp(call: Call) -> str | None:
    """Of what is left after the largest is taken away, so that nothing overflows."""
    axes = _axes(call)
    if not axes or call.type().dtype not in FLOATS:
        return None
    x = wide(call, call.value(0))
    largest = call.add(Reduce("max", axes), x)
    total = call.add(Reduce("sum", axes), call.apply(("exp", ("sub", 0, 1)), x, largest))
    y = call.apply(("add", ("log", 0), 1), total, largest)
    return cast(call, _kept(call, y, axes), call.type().dtype)


LOWERINGS: dict[str, Lowering] = {
    "GlobalAveragePool": functools.partial(_global_pool, "mean"),
    "GlobalMaxPool": functools.partial(_global_pool, "max"),
    "ReduceL1": functools.partial(_reduce_floats, ("abs", 0), "sum", 0),
    "ReduceL2": functools.partial(_reduce_floats, ("mul", 0, 0), "sum", ("sqrt", 0)),
    "ReduceLogSum": functools.partial(_reduce_floats, 0, "sum", ("log", 0)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": functools.partial(_reduce, "max"),
    "ReduceMean": functools.partial(_reduce, "mean"),
    "ReduceMin": functools.partial(_reduce_floats, ("neg", 0), "max", ("neg", 0)),
    "ReduceSum": functools.partial(_reduce, "sum"),
    "ReduceSumSquare": functools.partial(_reduce_floats, ("mul", 0, 0), "sum", 0),
}
