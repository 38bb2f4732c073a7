"""ONNX's reductions along axes, and the normalisations and softmaxes made of such, in terms of ours.

Where 16-bit floats are normalised, all is float32 until the result; the standard rounds once more before the scale.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np

from autoconv.common.epilogue.expressions import Expression
from autoconv.networks.normalisation import (
    affine,
    cast,
    centred,
    log_softmax,
    mean_square,
    normalised,
    normalised_in_groups,
    scaled_down,
    wide,
)
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.operators.elementwise import FLOATS
from autoconv.networks.operators.pooling import LRN, Reduce, Softmax
from autoconv.networks.translation import flattened

Reduction = Literal["max", "mean", "sum"]
PER_CHANNEL = 21  # the first opset in which scales and biases of groups are those of channels


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
    """Of what is left after the largest is taken away, so that nothing overflows; a finite one, as inf - inf is NaN."""
    axes = _axes(call)
    if not axes or call.type().dtype not in FLOATS:
        return None
    x = wide(call, call.value(0))
    bound = float(np.finfo(call.graph.types[x].dtype).max)
    largest = call.clip(call.add(Reduce("max", axes), x), -bound, bound)
    total = call.add(Reduce("sum", axes), call.apply(("exp", ("sub", 0, 1)), x, largest))
    y = call.apply(("add", ("log", 0), 1), total, largest)
    return cast(call, _kept(call, y, axes), call.type().dtype)


def _batch_normalization(call: Call) -> str:
    if call.attribute("training_mode", 0) or not call.attribute("spatial", 1):
        call.fail("expected inference per channel, got training_mode=1 or spatial=0")
    if call.opset < 14 and any(call.outputs[1:]):  # where no attribute tells the one from the other
        call.fail(f"expected the one output of inference, got the {sum(map(bool, call.outputs))} of training")
    names = [call.value(n) for n in range(5)]
    dtypes = {call.graph.types[name].dtype for name in names}
    if len(dtypes) > 1:  # images in 16 bits, and numbers of channels in float32
        names = [wide(call, name) for name in names]
    x, scale, bias, mean, variance = names
    return cast(call, call.batch_norm(x, scale, bias, mean, variance, _epsilon(call)), call.type().dtype)


def _epsilon(call: Call) -> float:
    return float(call.attribute("epsilon", 1e-5))


def _finished(call: Call, y: str, rest: int) -> str:
    """Scaled and shifted by the second and third inputs, after which so many axes come; in the type of the first."""
    scale, bias = (call.value(n) if call.has(n) else None for n in (1, 2))
    return cast(call, affine(call, y, scale, bias, rest), call.type().dtype)


def _last_axes(call: Call) -> tuple[int, ...]:
    """From the attribute `axis` on; scale and bias have to spread over them."""
    rank = len(call.type().shape)
    for n, what in ((1, "scale"), (2, "bias")):
        if call.has(n):
            call.check_spread(what, call.value(n), call.value(0))
    return tuple(range(call.axis(-1, rank), rank))


def _layer_normalization(call: Call) -> str | None:
    if any(call.outputs[1:]):  # the means and deviations, too
        return None
    axes = _last_axes(call)
    return _finished(call, normalised(call, wide(call, call.value(0)), axes, _epsilon(call)), 0)


def _rms_normalization(call: Call) -> str:
    axes = _last_axes(call)
    return _finished(call, scaled_down(call, wide(call, call.value(0)), axes, _epsilon(call)), 0)


def _instance_normalization(call: Call) -> str:
    x, rank = call.value(0), len(call.type().shape)
    for n, what in ((1, "scale"), (2, "bias")):
        call.check_channels(what, call.value(n), x)
    return _finished(call, normalised(call, wide(call, x), tuple(range(2, rank)), _epsilon(call)), rank - 2)


def _group_normalization(call: Call) -> str:
    x, shape, groups = call.value(0), call.type().shape, int(call.required("num_groups"))
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        call.fail(f"num_groups={groups}: expected a number that divides the channels of {shape}")
    numbers = shape[1] if call.opset >= PER_CHANNEL else groups
    for n, what in ((1, "scale"), (2, "bias")):
        if call.type(n).shape != (numbers,):
            call.fail(f"{what}: expected {numbers} numbers, got {call.type(n)}")
    y = normalised_in_groups(call, wide(call, x), groups, _epsilon(call))
    if call.opset < PER_CHANNEL:
        return call.reshape(_finished(call, y, 1), shape)
    return _finished(call, call.reshape(y, shape), len(shape) - 2)


def _mean_variance_normalization(call: Call) -> str:
    """Over the deviation and 1e-9, as the standard's function has it."""
    x = call.value(0)
    axes = call.axes(call.attribute("axes", (0, 2, 3)), len(call.type().shape))
    y = centred(call, wide(call, x), axes)
    y = call.apply(("div", 0, ("add", ("sqrt", 1), 1e-9)), y, mean_square(call, y, axes))
    return cast(call, y, call.type().dtype)


def _lrn(call: Call) -> str:
    found = LRN(
        size=int(call.required("size")),
        alpha=call.attribute("alpha", 1e-4),
        beta=call.attribute("beta", 0.75),
        bias=call.attribute("bias", 1.0),
    )
    return call.add(found, call.value(0))


def _softmax(call: Call) -> str:
    x, shape = call.value(0), call.type().shape
    if call.opset >= 13:
        return call.add(Softmax(call.axis(-1, len(shape))), x)
    rows = call.reshape(x, flattened(shape, call.axis(1, len(shape))))
    return call.reshape(call.add(Softmax(1), rows), shape)


def _log_softmax(call: Call) -> str:
    x, shape = call.value(0), call.type().shape
    if call.opset >= 13:
        return log_softmax(call, x, call.axis(-1, len(shape)))
    rows = call.reshape(x, flattened(shape, call.axis(1, len(shape))))
    return call.reshape(log_softmax(call, rows, 1), shape)


LOWERINGS: dict[str, Lowering] = {
    "BatchNormalization": _batch_normalization,
    "GlobalAveragePool": functools.partial(_global_pool, "mean"),
    "GlobalMaxPool": functools.partial(_global_pool, "max"),
    "GroupNormalization": _group_normalization,
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "LayerNormalization": _layer_normalization,
    "LogSoftmax": _log_softmax,
    "MeanVarianceNormalization": _mean_variance_normalization,
    "RMSNormalization": _rms_normalization,
    "ReduceL1": functools.partial(_reduce_floats, ("abs", 0), "sum", 0),
    "ReduceL2": functools.partial(_reduce_floats, ("mul", 0, 0), "sum", ("sqrt", 0)),
    "ReduceLogSum": functools.partial(_reduce_floats, 0, "sum", ("log", 0)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": functools.partial(_reduce, "max"),
    "ReduceMean": functools.partial(_reduce, "mean"),
    "ReduceMin": functools.partial(_reduce_floats, ("neg", 0), "max", ("neg", 0)),
    "ReduceSum": functools.partial(_reduce, "sum"),
    "ReduceSumSquare": functools.partial(_reduce_floats, ("mul", 0, 0), "sum", 0),
    "Softmax": _softmax,
}
