"""ATen's operators on single elements, and products of matrices, in terms of ours."""

from __future__ import annotations

import functools

from autoconv.common.epilogue.expressions import Expression
from autoconv.common.types import SUMS
from autoconv.networks.operators import activations
from autoconv.networks.operators.convolution import MatMul
from autoconv.networks.operators.elementwise import MIXED, NARROW, Elementwise
from autoconv.networks.operators.shapes import Transpose
from autoconv.networks.torch_reader.call import Call, Lowering
from autoconv.vendors.torch import array, tensor


def _identity(call: Call) -> str:
    return call.value("self")


def _to_copy(call: Call) -> str:
    x = call.value("self")
    found = call.graph.types[x].dtype
    wanted = str(call["dtype"]).removeprefix("torch.") if call.has("dtype") else found
    if wanted == found:
        return x
    if x in call.graph.constants:
        return call.add_constant(array(tensor(call.graph.constants[x]).to(call["dtype"])))  # beyond the range as there
    if found not in (*MIXED, *SUMS) or wanted not in ("float32", *NARROW):
        call.fail(f"expected a cast to a float of at most 32 bits, got one of {found} to {wanted}")
    return call.add(Elementwise(0, wanted), x)


def _function(expression: Expression, call: Call) -> str:
    return call.elements(expression, "self")


def _binary(function: str, call: Call) -> str:
    return call.elements((function, 0, 1), "self", "other")


def _sum(function: str, call: Call) -> str:
    alpha = call.number("alpha")
    return call.elements((function, 0, 1 if alpha == 1 else ("mul", alpha, 1)), "self", "other")


def _clip(low: str, high: str, call: Call) -> str:
    return call.clip(call.value("self"), *(call.scalar(name) if call.has(name) else None for name in (low, high)))


def _leaky_relu(call: Call) -> str:
    return call.elements(("prelu", 0, call.number("negative_slope")), "self")


def _prelu(call: Call) -> str:
    x, slope = call.value("self"), call.value("weight")
    rest = (1,) * max(len(call.shape_of(x)) - 2, 0)
    return call.apply(("prelu", 0, 1), x, call.reshape(slope, (*call.shape_of(slope), *rest)))


def _elu(call: Call) -> str:
    if call.number("input_scale") != 1:
        call.fail("expected an input_scale of 1")
    scale, expression = call.number("scale"), activations.elu(call.number("alpha"))
    return call.elements(expression if scale == 1 else ("mul", scale, expression), "self")


def _gelu(call: Call) -> str:
    return call.elements(activations.GELU_TANH if call["approximate"] == "tanh" else activations.GELU, "self")


def _softplus(call: Call) -> str:
    """log(1 + exp(beta x)) / beta, which PyTorch takes for x above a threshold."""
    beta, threshold = call.number("beta"), call.number("threshold")
    if beta <= 0 or threshold < LINEAR:
        call.fail(f"expected a positive beta and a threshold of at least {LINEAR:g}, got {beta:g} and {threshold:g}")
    if beta == 1:
        return call.elements(activations.SOFTPLUS, "self")
    return call.apply(("div", 0, beta), call.apply(activations.SOFTPLUS, call.elements(("mul", 0, beta), "self")))


def _power(call: Call) -> str:
    return call.elements(activations.power(float(call.number("exponent"))), "self")


def _linear(call: Call) -> str:
    x = call.value("input")
    shape = call.shape_of(x)
    x = call.reshape(x, (1, *shape)) if len(shape) == 1 else x  # a single row
    y = call.add(MatMul(transposed=True), x, call.value("weight"))
    y = call.apply(("add", 0, 1), y, call.value("bias")) if call.has("bias") else y
    return call.reshape(y, (*shape[:-1], call.shape_of(y)[-1]))


def _matrix_product(right: str, call: Call) -> str:
    a, b = call.value("self"), call.value(right)
    if min(len(call.shape_of(name)) for name in (a, b)) < 2:
        call.fail(f"expected matrices, got {call.shape_of(a)} and {call.shape_of(b)}")
    return call.add(MatMul(), a, b)


def _addmm(call: Call) -> str:
    y = call.add(MatMul(), call.value("mat1"), call.value("mat2"))
    alpha, beta = call.number("alpha"), call.number("beta")
    if beta == 0:  # then NaN in what is added counts for nothing
        return y if alpha == 1 else call.apply(("mul", alpha, 0), y)
    scaled = 1 if alpha == 1 else ("mul", alpha, 1)
    return call.apply(("add", 0 if beta == 1 else ("mul", beta, 0), scaled), call.value("self"), y)


def _transposed(call: Call) -> str:
    x = call.value("self")
    rank = len(call.shape_of(x))
    return call.add(Transpose(tuple(reversed(range(rank)))), x) if rank > 1 else x


LINEAR = 16.0  # from here on log(1 + exp(x)) is x in float32

LOWERINGS: dict[str, Lowering] = {
    "aten::_to_copy": _to_copy,
    "aten::linear": _linear,
    "aten::addmm": _addmm,
    "aten::mm": functools.partial(_matrix_product, "mat2"),
    "aten::bmm": functools.partial(_matrix_product, "mat2"),
    "aten::matmul": functools.partial(_matrix_product, "other"),
    "aten::t": _transposed,
    "aten::clamp": functools.partial(_clip, "min", "max"),
    "aten::hardtanh": functools.partial(_clip, "min_val", "max_val"),
    "aten::leaky_relu": _leaky_relu,
    "aten::prelu": _prelu,
    "aten::elu": _elu,
    "aten::gelu": _gelu,
    "aten::softplus": _softplus,
    "aten::pow.Tensor_Scalar": _power,
    "aten::add.Tensor": functools.partial(_sum, "add"),
    "aten::add.Scalar": functools.partial(_sum, "add"),
    "aten::sub.Tensor": functools.partial(_sum, "sub"),
    "aten::sub.Scalar": functools.partial(_sum, "sub"),
    **{f"aten::{name}": functools.partial(_binary, function) for name, function in {
        "mul.Tensor": "mul", "mul.Scalar": "mul", "div.Tensor": "div", "div.Scalar": "div",
        "maximum": "max", "minimum": "min"}.items()},
    **{f"aten::{name}": functools.partial(_function, expression) for name, expression in {
        "relu": ("relu", 0), "relu6": activations.clip(0.0, 6.0), "silu": activations.SILU,
        "hardswish": activations.HARD_SWISH, "hardsigmoid": activations.hard_sigmoid(),
        "mish": activations.MISH,
        "sigmoid": ("sigmoid", 0), "tanh": ("tanh", 0), "exp": ("exp", 0), "log": ("log", 0), "log1p": ("log1p", 0),
        "sqrt": ("sqrt", 0),
        "rsqrt": activations.RSQRT, "reciprocal": ("div", 1.0, 0), "erf": ("erf", 0), "abs": ("abs", 0),
        "neg": ("neg", 0), "square": ("mul", 0, 0)}.items()},
    **{f"aten::{name}": _identity for name in ("clone", "contiguous", "alias", "detach", "lift_fresh_copy")},
}  # fmt: skip
