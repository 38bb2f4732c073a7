"""ATen's normalisations and softmax in terms of ours."""

from __future__ import annotations

import math

import numpy as np

from autoconv.networks.normalisation import affine, cast, centred, log_softmax, normalised, normalised_in_groups, wide
from autoconv.networks.operators.convolution import MatMul
from autoconv.networks.operators.pooling import Reduce, Softmax
from autoconv.networks.operators.shapes import Transpose
from autoconv.networks.torch_reader.call import Call, Lowering


def _batch_norm(call: Call) -> str:
    x, mean, variance = call.value("input"), call.value("running_mean"), call.value("running_var")
    dtype = call.graph.types[mean].dtype
    scale, bias = (
        call.value(name) if call.has(name) else call.add_constant(np.full(call.shape_of(mean), filling, dtype))
        for name, filling in (("weight", 1), ("bias", 0))
    )
    return call.batch_norm(x, scale, bias, mean, variance, call.number("eps"))


def _affine(call: Call, y: str, rest: int) -> str:
    """Scaled and shifted by weight and bias, after which so many axes come; in the type of the input."""
    weight, bias = (call.value(name) if call.has(name) else None for name in ("weight", "bias"))
    return cast(call, affine(call, y, weight, bias, rest), call.graph.types[call.value("input")].dtype)


def _layer_norm(call: Call) -> str:
    x = call.value("input")
    rank = len(call.shape_of(x))
    axes = tuple(range(rank - len(call["normalized_shape"]), rank))
    return _affine(call, normalised(call, wide(call, x), axes, call.number("eps")), 0)


def _group_norm(call: Call) -> str:
    x = call.value("input")
    shape = call.shape_of(x)
    y = normalised_in_groups(call, wide(call, x), call["group"], call.number("eps"))
    return _affine(call, call.reshape(y, shape), len(shape) - 2)


def _instance_norm(call: Call) -> str:
    x = call.value("input")
    rank = len(call.shape_of(x))
    return _affine(call, normalised(call, wide(call, x), (0, *range(2, rank)), call.number("eps")), rank - 2)


def _variance(call: Call) -> str:
    x = call.value("self")
    axes = call.reduced_axes()
    total = call.add(Reduce("sum", axes), call.apply(("mul", 0, 0), centred(call, wide(call, x), axes)))
    less = call.number("correction") if call.has("correction") else 1.0
    count = math.prod(call.shape_of(x)[axis] for axis in axes)
    if count <= less:
        call.fail(f"correction={less:g}: expected less than the {count} numbers of which each variance is made")
    y = call.apply(("div", 0, count - less), total)
    return call.without(cast(call, y, call.graph.types[x].dtype), axes)


def _vector_norm(call: Call) -> str:
    """The sum of magnitudes, or the root of the sum of squares."""
    given, order = call.value("self"), call.number("ord")
    functions = {1.0: (("abs", 0), 0), 2.0: (("mul", 0, 0), ("sqrt", 0))}
    if order not in functions or call.has("dtype"):
        call.fail(f"ord={order:g}: expected 1 or 2, and no other type")
    element, whole = functions[order]
    axes = call.reduced_axes()
    y = call.add(Reduce("sum", axes), call.apply(element, wide(call, given)))
    y = y if whole == 0 else call.apply(whole, y)
    return call.without(cast(call, y, call.graph.types[given].dtype), axes)


def _attention(call: Call) -> str:
    """softmax(query key' * scale + mask) value."""
    dtype = call.graph.types[call.value("query")].dtype
    query, key, value = (wide(call, call.value(name)) for name in ("query", "key", "value"))
    if call["enable_gqa"] or call.number("dropout_p"):
        call.fail("expected as many heads of keys as of queries, and no dropout")
    shape = call.shape_of(query)
    scale = call.number("scale") if call.has("scale") else 1 / math.sqrt(shape[-1])
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    scores = call.add(MatMul(), call.apply(("mul", 0, scale), query), call.add(Transpose(order), key))
    if (mask := _mask(call, scores)) is not None:
        call.check_spread("attn_mask", mask, scores)
        scores = call.apply(("add", 0, 1), scores, mask)
    return cast(call, call.add(MatMul(), call.add(Softmax(len(shape) - 1), scores), value), dtype)


def _mask(call: Call, scores: str) -> str | None:
    """What is added to the scores of attention, a constant, if anything is.

    Where it leaves nothing of a row PyTorch gives zeros, so one that is computed is left to PyTorch.
    """
    found = call.graph.types[scores]
    if call["is_causal"]:
        return call.add_constant(np.triu(np.full(found.shape[-2:], -np.inf, found.dtype), 1))
    if not call.has("attn_mask"):
        return None
    if (name := call.value("attn_mask")) not in call.graph.constants:
        call.fail("attn_mask: expected one that is known before the run")
    given = call.graph.constants[name]
    mask = np.where(given, 0, -np.inf) if given.dtype == bool else given
    if np.isneginf(mask).all(axis=-1).any():
        call.fail("attn_mask: expected one that leaves something of every row")
    return call.add_constant(mask.astype(found.dtype))


def _softmax(call: Call) -> str:
    x = call.value("self")
    return call.add(Softmax(call.axis("dim", len(call.shape_of(x)))), x)


def _log_softmax(call: Call) -> str:
    x = call.value("self")
    return log_softmax(call, x, call.axis("dim", len(call.shape_of(x))))


LOWERINGS: dict[str, Lowering] = {
    "aten::_native_batch_norm_legit_no_training": _batch_norm,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_group_norm": _group_norm,
    "aten::_native_batch_norm_legit.no_stats": _instance_norm,
    "aten::var.correction": _variance,
    "aten::linalg_vector_norm": _vector_norm,
    "aten::scaled_dot_product_attention": _attention,
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _log_softmax,
}
