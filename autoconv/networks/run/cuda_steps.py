"""What runs a node on a GPU: the kernels of `cuda.operators`, and cuBLAS for products of two computed matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from autoconv.algorithm import Array, Kernel
from autoconv.common.arrays import Strides, broadcast, collapsed, contiguous
from autoconv.common.epilogue import activations
from autoconv.common.epilogue.expressions import Expression, substituted
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import aligned
from autoconv.cuda.device import CUDA
from autoconv.cuda.libraries.cublas_cufft import Matrices, Multiply, product
from autoconv.cuda.operators import units
from autoconv.cuda.operators.elementwise import MOST_INPUTS, TYPES, elementwise
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.graph import Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import (
    LRN,
    Concat,
    Elementwise,
    MatMul,
    Normalization,
    Operator,
    Pad,
    Pool,
    Reduce,
    Resize,
    Slice,
    Softmax,
    Transpose,
)
from autoconv.networks.operators.base import in_nchw
from autoconv.networks.run.steps import Call, Ref, Scratch, Step, StepMaker
from autoconv.plans import Plan


class CudaStepMaker(StepMaker):
    """Finds kernels of a GPU for the nodes of a graph.

    A call's program is a `Unit`, or a function that launches; its operands are the arguments.

    Raises
    ------
    PlanError
        For a node that has none; the message names node and operator.
    """

    def step(self, node: Node) -> Step:
        types = [self.graph.types[name] for name in (*node.inputs, node.name)]
        calls = None
        if self._has_kernels(node.operator, {t.dtype for t in types}) and all(math.prod(t.shape) for t in types):
            calls = self._calls(node)
        if calls is None:
            given = ", ".join(map(str, types[:-1]))
            raise PlanError(
                f"{self.graph.name}: node {node.name!r}, {node.operator.kind} of {given}: no kernel for a GPU"
            )
        return Step(node, "cuBLAS" if isinstance(node.operator, MatMul) else "kernel", tuple(calls))

    def layer_step(self, node: Node, made: Plan, kernel: Kernel, packed: Callable[[], Array]) -> Step:
        scratch, program = kernel.workspace_bytes, functools.partial(_run, kernel, made.layer)
        if kernel.packed_bytes and node.inputs[1] not in self.graph.constants:
            scratch = aligned(kernel.workspace_bytes) + kernel.packed_bytes
            program = functools.partial(_pack_and_run, kernel, made.layer)
        return Step(node, str(made.candidate), (Call(program, self._operands(node, made, kernel, packed), scratch),))

    def scratch_bytes(self, node: Node) -> int:
        product = isinstance(node.operator, MatMul) and layer_of(self.graph, node) is None
        return self._cuda.blas().workspace_bytes if product else 0

    def _has_kernels(self, operator: Operator, dtypes: set[str]) -> bool:
        if dtypes == {"float32"}:
            return True
        if isinstance(operator, Elementwise) and operator.dtype is not None:
            return dtypes <= {*TYPES}
        return isinstance(operator, Concat | Pad | Slice | Transpose)

    def _calls(self, node: Node) -> list[Call] | None:
        operator, dtype = node.operator, self.graph.types[node.name].dtype
        before = self.graph.types[node.inputs[0]].shape
        if isinstance(operator, MatMul):
            return self._product(node, operator)
        if isinstance(operator, Pad):
            return [self._unit(units.pad(before, operator.before, operator.after, operator.value, dtype), node)]
        if isinstance(operator, Elementwise) and len(node.inputs) > MOST_INPUTS:
            return None
        return super()._calls(node)

    def _gathering(self, node: Node, before: tuple[int, ...], shape: tuple[int, ...]) -> list[Call] | None:
        operator = node.operator
        if isinstance(operator, Pool):
            N, C, H, W = in_nchw(operator.layout, before)
            P, Q = in_nchw(operator.layout, shape)[2:]
            images, inner = (N * C, 1) if operator.layout == "NCHW" else (N, C)
            unit = units.pool(
                operator.reduction, images, inner, (H, W), (P, Q), operator.window, operator.stride, operator.padding,
                operator.dilation, operator.include_padding,
            )  # fmt: skip
            return [self._unit(unit, node)]
        if isinstance(operator, Reduce):
            return [self._unit(units.reduction(operator.reduction, before, operator.axes), node)]
        if isinstance(operator, Softmax):
            return [self._unit(units.softmax(shape, operator.axis), node)]
        if isinstance(operator, Normalization):
            period = self._period(node, operator)
            args = operator.axis, operator.epsilon, operator.centred, operator.affine, period
            return [Call(units.normalization(before, *args), (*map(Ref, (node.name, *node.inputs)), None, None)[:4])]
        if isinstance(operator, LRN):
            return [self._unit(units.lrn(shape, operator.size, operator.alpha, operator.beta, operator.bias), node)]
        if isinstance(operator, Resize):
            axis, on_device = operator.axis, self.device.asarray
            places, weights = np.asarray(operator.indices, np.int32), np.asarray(operator.weights, np.float32)
            outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
            unit = units.resize(outer, before[axis], shape[axis], inner, places.shape[1])
            return [self._unit(unit, node, on_device(places), on_device(weights))]
        return None

    def _unit(self, unit: Unit, node: Node, *more: Array) -> Call:
        """A kernel of one input, and perhaps tables."""
        return Call(unit, (Ref(node.name), Ref(node.inputs[0]), *more))

    def _expression(
        self,
        expression: Expression,
        shape: tuple[int, ...],
        out: Strides,
        node: Node,
        strides: Sequence[Strides],
        inputs: Sequence[str],
        start: int = 0,
        to: int = 0,
    ) -> Call:
        sizes, steps = collapsed(shape, [out, *strides])
        types = [self.graph.types[name].dtype for name in (node.name, *inputs)]
        starts = [to, *[start] * bool(inputs), *[0] * (len(inputs) - 1)]
        operands = (*map(Ref, (node.name, *inputs)), *[None] * (MOST_INPUTS - len(inputs)))
        return Call(elementwise(expression, sizes, steps, types, starts), operands)

    def _transposed_matrices(self, node: Node, matrices: int, rows: int, columns: int) -> Call:
        return self._unit(units.transpose(matrices, rows, columns, self.graph.types[node.name].dtype), node)

    def _product(self, node: Node, operator: MatMul) -> list[Call] | None:
        """A product of computed matrices, and the epilogue over it."""
        a, b, out = (self.graph.types[name].shape for name in (*node.inputs[:2], node.name))
        batch = math.prod(out[:-2])
        if any(math.prod(s[:-2]) not in (1, batch) for s in (a, b)):
            return None
        (m, k), n = a[-2:], out[-1]
        of_b = Matrices(1, k, n * k) if operator.transposed else Matrices(n, 1, n * k)
        of_a, of_b = (
            matrices if math.prod(s[:-2]) == batch else matrices._replace(batch=0)
            for matrices, s in ((Matrices(k, 1, m * k), a), (of_b, b))
        )
        multiply = product(
            self._cuda.blas(), ("float32", "float32"), (m, n, k), batch, of_a, of_b, Matrices(n, 1, m * n)
        )
        operands = Ref(node.inputs[0]), Ref(node.inputs[1]), Ref(node.name), Scratch()
        calls = [Call(functools.partial(_multiply, self._cuda, multiply), operands, self.scratch_bytes(node))]
        names = (node.name, *node.inputs[2:])
        finished: Expression = 0
        for place in range(1, len(names)):
            finished = ("add", finished, place)
        if operator.activation is not None:
            finished = substituted(activations.expression(operator.activation), {0: finished})
        if finished != 0:
            strides = [broadcast(self.graph.types[name].shape, out) for name in names]
            calls.append(self._expression(finished, out, contiguous(out), node, strides, names))
        return calls

    @property
    def _cuda(self) -> CUDA:
        assert isinstance(self.device, CUDA)
        return self.device


def _run(
    kernel: Kernel, layer: ConvLayer, x: Array, w: Array, y: Array, bias: Array, residual: Array, workspace: Array
) -> None:
    """Launch a layer's kernel on arrays of a graph, whose shapes may differ from the layer's."""
    x, y = x.reshape(layer.input_shapes[0]), y.reshape(layer.output_shape)
    w = w if kernel.packed_bytes else w.reshape(layer.w_shape)
    kernel.run(x, w, y, bias, None if residual is None else residual.reshape(layer.output_shape), workspace)


def _pack_and_run(kernel: Kernel, layer: ConvLayer, x: Array, w: Array, *rest: Array) -> None:
    """The same with filters that were computed just now."""
    y, bias, residual, scratch = rest
    packed = scratch[aligned(kernel.workspace_bytes) :]
    kernel.pack(w.reshape(layer.w_shape), packed)
    _run(kernel, layer, x, packed, y, bias, residual, scratch[: kernel.workspace_bytes])


def _multiply(device: CUDA, multiply: Multiply, a: Array, b: Array, out: Array, workspace: Array) -> None:
    multiply(device.address(a), device.address(b), device.address(out), device.address(workspace), False)
