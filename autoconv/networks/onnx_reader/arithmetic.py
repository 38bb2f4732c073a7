"""ONNX's operators on single elements, and products of matrices, in terms of ours."""

from __future__ import annotations

import functools
import math

from autoconv.common.epilogue.expressions import Expression
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.operators import activations
from autoconv.networks.operators.convolution import MatMul
from autoconv.networks.operators.elementwise import FLOATS
from autoconv.networks.operators.pooling import Reduce
from autoconv.networks.operators.shapes import Transpose


def _applied(call: Call, expression: Expression, *inputs: str) -> str:
    return call.apply(expression, *(inputs or [call.value(0)]))


def _variadic(function: str, call: Call) -> str:
    values = [call.value(n) for n in range(len(call.inputs))]
    total = values[0]
    for value in values[1:]:
        total = _applied(call, (function, 0, 1), total, value)
    return total


def _mean(call: Call) -> str:
    return _applied(call, ("mul", 0, 1 / len(call.inputs)), _variadic("add", call))


def _binary(function: str, call: Call) -> str:
    return _applied(call, (function, 0, 1), call.value(0), call.value(1))


def _unary(function: str, call: Call) -> str:
    return _applied(call, (function, 0))


def _clip(call: Call) -> str:
    # A bound that is not given is none: the standard has the largest number for it, which differs for infinity alone.
    bounds: list[float | None] = [call.attribute("min"), call.attribute("max")]
    given = [n for n in (1, 2) if call.has(n)]
    if not all(call.value(n) in call.graph.constants for n in given):
        expression: Expression = 0
        for place, n in enumerate(given, 1):
            expression = (("max", "min")[n - 1], expression, place)
        return _applied(call, expression, call.value(0), *map(call.value, given))
    for n in given:
        bounds[n - 1] = call.constant(n, ("min", "max")[n - 1]).item()
    return call.clip(call.value(0), *bounds)


def _leaky_relu(call: Call) -> str:
    return _applied(call, ("prelu", 0, float(call.attribute("alpha", 0.01))))


def _prelu(call: Call) -> str:
    x, slope = call.value(0), call.value(1)
    call.check_spread("slope", slope, x)
    return _applied(call, ("prelu", 0, 1), x, slope)


def _elu(call: Call) -> str:
    return _applied(call, activations.elu(float(call.attribute("alpha", 1.0))))


def _hard_sigmoid(call: Call) -> str:
    alpha, beta = float(call.attribute("alpha", 0.2)), float(call.attribute("beta", 0.5))
    return _applied(call, activations.hard_sigmoid(alpha, beta))


def _hard_swish(call: Call) -> str:
    return _applied(call, activations.HARD_SWISH)


def _swish(call: Call) -> str:
    alpha = float(call.attribute("alpha", 1.0))
    return _applied(call, activations.SILU if alpha == 1.0 else ("mul", 0, ("sigmoid", ("mul", 0, alpha))))


def _gelu(call: Call) -> str:
    kinds = {"none": activations.GELU, "tanh": activations.GELU_TANH}
    if (given := call.attribute("approximate", "none")) not in kinds:
        call.fail(f"approximate={given!r}: expected one of {', '.join(kinds)}")
    return _applied(call, kinds[given])


def _power(call: Call) -> str | None:
    exponent = call.graph.constants.get(call.value(1))
    if exponent is not None and exponent.size == 1 and exponent.ndim <= len(call.type().shape):
        return _of_floats(activations.power(float(exponent.item())), call)
    return _of_floats(("pow", 0, 1), call, 2) if call.type(0).dtype == call.type(1).dtype else None


def _of_floats(expression: Expression, call: Call, inputs: int = 1) -> str | None:
    """A function that is defined here for floats alone."""
    if call.type().dtype not in FLOATS:
        return None
    return _applied(call, expression, *map(call.value, range(inputs)))


def _selu(call: Call) -> str | None:
    alpha = float(call.attribute("alpha", 1.67326319217681884765625))
    gamma = float(call.attribute("gamma", 1.05070102214813232421875))
    return _of_floats(("mul", gamma, activations.elu(alpha)), call)


def _celu(call: Call) -> str | None:
    alpha = float(call.attribute("alpha", 1.0))
    below: Expression = ("mul", alpha, ("sub", ("exp", ("div", ("min", 0, 0.0), alpha)), 1.0))
    return _of_floats(("add", ("max", 0, 0.0), below), call) if alpha else None


def _gemm(call: Call) -> str:
    a, b = call.value(0), call.value(1)
    if len(call.type(0).shape) != 2 or len(call.type(1).shape) != 2:
        call.fail(f"expected two matrices, got {call.type(0)} and {call.type(1)}")
    if call.attribute("transA", 0):
        a = call.add(Transpose((1, 0)), a)
    y = call.add(MatMul(transposed=bool(call.attribute("transB", 0))), a, b)
    if (alpha := float(call.attribute("alpha", 1.0))) != 1.0:
        y = _applied(call, ("mul", 0, alpha), y)
    if not call.has(2):
        return y
    c = call.value(2)
    call.check_spread("C", c, y)
    if (beta := float(call.attribute("beta", 1.0))) != 1.0:
        c = _applied(call, ("mul", 0, beta), c)
    return _applied(call, ("add", 0, 1), y, c)


def _matmul(call: Call) -> str:
    a, b = call.value(0), call.value(1)
    left, right = call.type(0).shape, call.type(1).shape
    if not left or not right:
        call.fail("expected at least one dimension on either side")
    if len(left) == 1:
        a = call.reshape(a, (1, *left))
    if len(right) == 1:
        b = call.reshape(b, (*right, 1))
    y = call.add(MatMul(), a, b)
    shape = list(call.graph.types[y].shape)
    if len(right) == 1:
        del shape[-1]
    if len(left) == 1:
        del shape[len(shape) - (1 if len(right) == 1 else 2)]
    return call.reshape(y, shape)


def _einsum(call: Call) -> str | None:
    """Products of two arrays at a time, as one of matrices; sums of what no other and not the output has come first."""
    equation = call.required("equation").replace(" ", "")
    sides, arrow, output = equation.partition("->")
    terms, values = sides.split(","), [call.value(n) for n in range(len(call.inputs))]
    output = output if arrow else "".join(sorted(x for x in {*sides} - {","} if sides.count(x) == 1))
    plain = all(not term or (term.isalpha() and len({*term}) == len(term)) for term in (*terms, output))
    if not plain or any(call.graph.types[value].dtype not in FLOATS for value in values):
        return None  # diagonals, dimensions without a letter, integers
    extents: dict[str, int] = {}
    for term, shape in zip(terms, map(call.shape_of, values), strict=True):
        given = dict(zip(term, shape, strict=False))
        if len(term) != len(shape) or given != {letter: extents.get(letter, n) for letter, n in given.items()}:
            call.fail(f"equation={equation!r}: expected a letter for each dimension, got {shape} for {term!r}")
        extents |= given
    if not {*output} <= extents.keys():
        call.fail(f"equation={equation!r}: expected letters of the inputs behind the arrow")
    (y, term), *others = zip(values, terms, strict=True)
    for n, other in enumerate(others, 2):
        y, term = _product(call, (y, term), other, {*output, *"".join(terms[n:])})
    return _reordered(call, *_summed(call, y, term, {*output}), output)


def _product(call: Call, one: tuple[str, str], two: tuple[str, str], kept: set[str]) -> tuple[str, str]:
    """The sum of products of two arrays, each with the letters of its dimensions, over letters that are not kept."""
    (a, ours), (b, its) = (
        _summed(call, *one, kept | {*two[1]}),
        _summed(call, *two, kept | {*one[1]}),
    )
    extents = dict(zip(ours + its, call.shape_of(a) + call.shape_of(b), strict=True))
    batch, inner = ("".join(x for x in ours if x in its and (x in kept) == wanted) for wanted in (True, False))
    left, right = "".join(x for x in ours if x not in its), "".join(x for x in its if x not in ours)
    groups, rows, depth, columns = (math.prod(extents[x] for x in letters) for letters in (batch, left, inner, right))
    first, second = _reordered(call, a, ours, batch + left + inner), _reordered(call, b, its, batch + inner + right)
    many = (groups,) if batch else ()
    product = MatMul(), call.reshape(first, (*many, rows, depth)), call.reshape(second, (*many, depth, columns))
    term = batch + left + right
    return call.reshape(call.add(*product), [extents[x] for x in term]), term


def _summed(call: Call, x: str, term: str, kept: set[str]) -> tuple[str, str]:
    """An array without the dimensions whose letters are not kept, and its letters then."""
    axes = tuple(n for n, letter in enumerate(term) if letter not in kept)
    left = "".join(letter for letter in term if letter in kept)
    if not axes:
        return x, term
    shape = [extent for n, extent in enumerate(call.shape_of(x)) if n not in axes]
    return call.reshape(call.add(Reduce("sum", axes), x), shape), left


def _reordered(call: Call, x: str, term: str, wanted: str) -> str:
    return x if term == wanted else call.add(Transpose(tuple(term.index(letter) for letter in wanted)), x)


LOWERINGS: dict[str, Lowering] = {
    "Celu": _celu,
    "Clip": _clip,
    "Einsum": _einsum,
    "Elu": _elu,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky_relu,
    "MatMul": _matmul,
    "Mean": _mean,
    "PRelu": _prelu,
    "Pow": _power,
    "Selu": _selu,
    "Swish": _swish,
    **{name: functools.partial(_variadic, function) for name, function in
       {"Sum": "add", "Max": "max", "Min": "min"}.items()},
    **{name: functools.partial(_binary, function) for name, function in
       {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}.items()},
    **{name: functools.partial(_of_floats, expression) for name, expression in
       {"Mish": activations.MISH, "Reciprocal": ("div", 1.0, 0), "Softplus": activations.SOFTPLUS,
        "Softsign": ("div", 0, ("add", 1.0, ("abs", 0)))}.items()},
    **{name: functools.partial(_unary, name.lower()) for name in
       ("Relu", "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Erf", "Abs", "Neg")},
}  # fmt: skip
