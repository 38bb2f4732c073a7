"""A graph as a module of PyTorch, in the operators that PyTorch's own users would write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autoconv.common.epilogue import activations
from autoconv.common.epilogue.expressions import Expression, constant_of, substituted
from autoconv.errors import PlanError
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import (
    LRN,
    Concat,
    Conv,
    ConvTranspose,
    Elementwise,
    MatMul,
    Pad,
    Pool,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    Transpose,
)
from autoconv.networks.passes.folding import fold_padding, fold_scaling
from autoconv.networks.passes.fusion import fuse_elementwise, inline_scalars
from autoconv.networks.passes.identities import drop_identities
from autoconv.networks.passes.products import transpose_matrices

if TYPE_CHECKING:
    from autoconv.layer import Sides

# What its users have done before they measure: batch normalisation is in the filters. The rest brings every chain of
# functions into one place, where `_Writer` finds those for which PyTorch has one function.
FOLDED = (drop_identities, fold_padding, transpose_matrices, fold_scaling, inline_scalars, fuse_elementwise)
BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "max": "maximum", "min": "minimum", "pow": "pow"}
ACTIVATIONS = {name: activations.expression(name) for name in ("silu", "gelu", "hardswish", "hardsigmoid")}
UNARY = ("neg", "abs", "sqrt", "exp", "log", "log1p", "erf", "tanh", "sigmoid", "relu")


def torch_module(graph: Graph) -> Any:
    """A `torch.fx.GraphModule` that takes the graph's inputs, in their order, and gives a tuple of its outputs.

    Parameters
    ----------
    graph : Graph
        As it was read, before any pass.

    Returns
    -------
    torch.fx.GraphModule
        For inference.

    Raises
    ------
    PlanError
        For an operator that has no form here.
    """
    found = graph.copy()
    for rewrite in FOLDED:
        rewrite(found)
        found.clean()
    return _Writer(found).module()


class _Writer:
    """Writes node after node."""

    def __init__(self, graph: Graph) -> None:
        import torch

        self.torch, self.functional = torch, torch.nn.functional
        self.graph, self.root, self.fx = graph, torch.nn.Module(), torch.fx.Graph()
        self.values: dict[str, Any] = {}

    def module(self) -> Any:
        for n, name in enumerate(self.graph.inputs):
            self.values[name] = self.fx.placeholder(f"x{n}")
        for node in self.graph.nodes.values():
            self.values[node.name] = self._node(node)
        self.fx.output(tuple(self._value(name) for name in self.graph.outputs.values()))
        return self.torch.fx.GraphModule(self.root, self.fx).eval()

    def _value(self, name: str) -> Any:
        if name not in self.values:
            self.values[name] = self._constant(self.graph.constants[name])
        return self.values[name]

    def _constant(self, array: np.ndarray) -> Any:
        name = f"constant{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, self.torch.from_numpy(np.array(array)))
        return self.fx.get_attr(name)

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return self.fx.call_function(function, arguments, named)

    def _node(self, node: Node) -> Any:
        operator, inputs = node.operator, [self._value(name) for name in node.inputs]
        if isinstance(operator, Conv | ConvTranspose | MatMul):
            return self._product(operator, inputs)
        if isinstance(operator, Elementwise) and operator.dtype is None:
            return self._expression(operator.expression, node)
        if isinstance(operator, Pool):
            return self._pool(operator, inputs[0], node)
        return self._other(operator, inputs)

    def _product(self, operator: Conv | ConvTranspose | MatMul, inputs: Sequence[Any]) -> Any:
        x, w, *rest = inputs
        bias = rest[0] if operator.bias else None
        if isinstance(operator, MatMul):
            if operator.transposed:
                return self._call(self.functional.linear, x, w, bias)
            return self._call(self.torch.matmul, x, w)
        if isinstance(operator, ConvTranspose):
            (top, bottom), (left, right) = operator.padding
            if top != bottom or left != right:
                raise PlanError(f"transposed convolution with padding {operator.padding}: uneven")
            return self._call(
                self.functional.conv_transpose2d, x, w, bias, operator.stride, (top, left), operator.extra_size,
                operator.groups, operator.dilation,
            )  # fmt: skip
        x, padding = self._padded(x, operator.padding, 0.0)
        return self._call(
            self.functional.conv2d, x, w, bias, operator.stride, padding, operator.dilation, operator.groups
        )

    def _padded(self, x: Any, sides: Sides, value: float) -> tuple[Any, tuple[int, int]]:
        """The input and the padding left to the operator: all of it, where it is even."""
        (top, bottom), (left, right) = sides
        if top == bottom and left == right:
            return x, (top, left)
        return self._call(self.functional.pad, x, (left, right, top, bottom), value=value), (0, 0)

    def _pool(self, pool: Pool, x: Any, node: Node) -> Any:
        shape, ceil = self.graph.types[node.name].shape, pool.overhang != (0, 0)
        if pool.reduction == "max":
            x, padding = self._padded(x, pool.padding, float("-inf"))
            y = self._call(
                self.functional.max_pool2d, x, pool.window, pool.stride, padding, pool.dilation, ceil_mode=ceil
            )
        else:
            (top, bottom), (left, right) = pool.padding
            if pool.dilation != (1, 1):
                raise PlanError(f"average of windows with dilation {pool.dilation}")
            if (top, left) != (bottom, right):
                return self._uneven_average(pool, x, self.graph.types[node.inputs[0]].shape)
            x, padding = self._padded(x, pool.padding, 0.0)
            y = self._call(
                self.functional.avg_pool2d, x, pool.window, pool.stride, padding, ceil_mode=ceil,
                count_include_pad=pool.include_padding,
            )  # fmt: skip
        return self._call(_first, y, shape[2], shape[3]) if ceil else y

    def _uneven_average(self, pool: Pool, x: Any, shape: tuple[int, ...]) -> Any:
        """Sums of the windows of a padded image, each over its own count: PyTorch knows one padding for both sides."""
        sides = tuple((before, after + over) for (before, after), over in zip(pool.padding, pool.overhang, strict=True))
        (top, bottom), (left, right) = sides
        padded = self._call(self.functional.pad, x, (left, right, top, bottom))
        sums = self._call(self.functional.avg_pool2d, padded, pool.window, pool.stride, divisor_override=1)
        return self._call(self.torch.mul, sums, self._constant((1 / pool.counts(shape)).astype(np.float32)))

    def _other(self, operator: Any, inputs: Sequence[Any]) -> Any:
        torch, functional = self.torch, self.functional
        x = inputs[0]
        if isinstance(operator, Reshape):
            return self._call(torch.reshape, x, operator.shape)
        if isinstance(operator, Transpose):
            return self._call(torch.permute, x, operator.order)
        if isinstance(operator, Concat):
            return self._call(torch.cat, list(inputs), operator.axis)
        if isinstance(operator, Softmax):
            return self._call(functional.softmax, x, operator.axis)
        if isinstance(operator, LRN) and operator.size % 2:
            constants = operator.size, operator.alpha, operator.beta, operator.bias
            return self._call(functional.local_response_norm, x, *constants)
        if isinstance(operator, Reduce):
            function = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[operator.reduction]
            return self._call(function, x, operator.axes, True)
        if isinstance(operator, Slice) and min(operator.steps) > 0:
            places = zip(operator.starts, operator.counts, operator.steps, strict=True)
            return self._call(_cut, x, tuple((a, a + count * step, step) for a, count, step in places))
        if isinstance(operator, Pad):
            sides = [n for pair in zip(operator.before, operator.after, strict=True) for n in reversed(pair)]
            return self._call(functional.pad, x, tuple(reversed(sides)), value=operator.value)
        raise PlanError(f"{operator.kind} has no form in PyTorch here")

    def _expression(self, expression: Expression, node: Node) -> Any:
        if isinstance(expression, int):
            return self._value(node.inputs[expression])
        function, *parts = expression
        if (number := constant_of(expression)) is not None:
            return number
        if (known := self._known(expression, node)) is not None:
            return known
        values = [self._expression(part, node) for part in parts]
        if function in UNARY:
            return self._call(getattr(self.torch, function), *values)
        if function in ("max", "min") and any(constant_of(part) is not None for part in parts):
            number, x = sorted(values, key=lambda value: not isinstance(value, float))
            return self._call(self.torch.clamp, x, **{"min" if function == "max" else "max": number})
        if function == "prelu" and isinstance(values[1], float):
            return self._call(self.functional.leaky_relu, *values)
        if function in BINARY:
            return self._call(getattr(self.torch, BINARY[function]), *values)
        raise PlanError(f"{function} has no form in PyTorch here")

    def _known(self, expression: Expression, node: Node) -> Any:
        """What PyTorch has one function for."""
        function, *parts = expression
        for name, activation in ACTIVATIONS.items():
            for x in _parts(expression):
                if substituted(activation, {0: x}) == expression:
                    return self._call(getattr(self.functional, name), self._expression(x, node))
        if function == "min" and isinstance(parts[0], tuple) and parts[0][0] in ("relu", "max"):
            low = 0.0 if parts[0][0] == "relu" else constant_of(parts[0][2])
            high = constant_of(parts[1])
            if low is not None and high is not None:
                return self._call(self.functional.hardtanh, self._expression(parts[0][1], node), low, high)
        if function == "add" and isinstance(parts[0], tuple) and parts[0][0] == "mul":
            (_, x, scale), shift = parts[0], parts[1]
            scales, shifts = self._channels(scale, node), self._channels(shift, node)
            if scales is not None and shifts is not None:
                ones, zeros = np.ones_like(scales), np.zeros_like(scales)
                means, variances, factors, summands = map(self._constant, (zeros, ones, scales, shifts))
                y = self._expression(x, node)
                return self._call(self.functional.batch_norm, y, means, variances, factors, summands, False, 0.0, 0.0)
        return None

    def _channels(self, expression: Expression, node: Node) -> np.ndarray | None:
        """The constant numbers for each channel that an expression is; None for anything else."""
        constant = self.graph.constants.get(node.inputs[expression]) if isinstance(expression, int) else None
        shape = self.graph.types[node.name].shape
        if constant is None or len(shape) != 4 or constant.size != shape[1]:
            return None
        full = (*[1] * (4 - constant.ndim), *constant.shape)
        return constant.reshape(-1) if full == (1, shape[1], 1, 1) else None


def _parts(expression: Expression) -> Iterator[Expression]:
    """An expression, and all that it is made of."""
    yield expression
    if isinstance(expression, tuple) and constant_of(expression) is None:
        for part in expression[1:]:
            yield from _parts(part)


def _first(x: Any, rows: int, columns: int) -> Any:
    return x[:, :, :rows, :columns]


def _cut(x: Any, places: tuple[tuple[int, int, int], ...]) -> Any:
    return x[tuple(slice(*place) for place in places)]
