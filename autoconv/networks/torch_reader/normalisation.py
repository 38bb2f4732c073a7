"""ATen's normalisations and softmax in terms of ours."""

from __future__ import annotations

import math

import numpy as np

from autoconv.networks.operators.elementwise import NARROW, Elementwise
from autoconv.networks.operators.pooling import Reduce, Softmax
from autoconv.networks.torch_reader.call import Call, Lowering


def _batch_norm(call: Call) -> list[str]:
    x, mean, variance = call.value("input"), call.value("running_mean"), call.value("running_var")
    dtype = call.graph.types[mean].dtype
    scale, bias = (
        call.value(name) if call.has(name) else call.add_constant(np.full(call.shape_of(mean), filling, dtype))
        for name, filling in (("weight", 1), ("bias", 0))
    )
    return [call.batch_norm(x, scale, bias, mean, variance, call.number("eps"))]


def _cast(call: Call, x: str, dtype: str) -> str:
    """An array in another type; itself, where it has that."""
    return x if call.graph.types[x].dtype == dtype else call.add(Elementwise(0, dtype), x)


def _wide(call: Call, x: str) -> str:
    """Floats of 16 bits as float32: squares and sums do not fit into float16, and bfloat16 has too few digits."""
    return _cast(call, x, "float32") if call.graph.types[x].dtype in NARROW else x


def _normalised(call: Call, x: str, axes: tuple[int, ...]) -> str:
    """An array of mean 0 and variance 1 along axes."""
    centred = call.apply(("sub", 0, 1), x, call.add(Reduce("mean", axes), x))
    variance = call.add(Reduce("mean", axes), call.apply(("mul", 0, 0), centred))
    return call.apply(("div", 0, ("sqrt", ("add", 1, call.number("eps")))), centred, variance)


def _affine(call: Call, y: str, rest: int) -> str:
    """Scaled and shifted by weight and bias, after which so many axes come."""
    for function, name in (("mul", "weight"), ("add", "bias")):
        if call.has(name):
            constant = _wide(call, call.value(name))
            y = call.apply((function, 0, 1), y, call.reshape(constant, (*call.shape_of(constant), *(1,) * rest)))
    return y


def _layer_norm(call: Call) -> list[str]:
    x = call.value("input")
    rank = len(call.shape_of(x))
    axes = tuple(range(rank - len(call["normalized_shape"]), rank))
    y = _affine(call, _normalised(call, _wide(call, x), axes), 0)
    return [_cast(call, y, call.graph.types[x].dtype)]


def _group_norm(call: Call) -> list[str]:
    x, groups = call.value("input"), call["group"]
    shape = call.shape_of(x)
    grouped = call.reshape(_wide(call, x), (shape[0], groups, math.prod(shape[1:]) // groups))
    y = _affine(call, call.reshape(_normalised(call, grouped, (2,)), shape), len(shape) - 2)
    return [_cast(call, y, call.graph.types[x].dtype)]


def _softmax(call: Call) -> str:
    x = call.value("self")
    return call.add(Softmax(call.axis("dim", len(call.shape_of(x)))), x)


def _log_softmax(call: Call) -> str:
    given = call.value("self")
    x, axes = _wide(call, given), (call.axis("dim", len(call.shape_of(given))),)
    below = call.apply(("sub", 0, 1), x, call.add(Reduce("max", axes), x))
    total = call.add(Reduce("sum", axes), call.apply(("exp", 0), below))
    return _cast(call, call.apply(("sub", 0, ("log", 1)), below, total), call.graph.types[given].dtype)


LOWERINGS: dict[str, Lowering] = {
    "aten::_native_batch_norm_legit_no_training": _batch_norm,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_group_norm": _group_norm,
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _log_softmax,
}
