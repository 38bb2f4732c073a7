"""What runs a node: kernels with their operands, or NumPy where there is none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from autoconv.algorithm import Array, Kernel
from autoconv.common.arrays import Strides, broadcast, collapsed, contiguous
from autoconv.common.types import INTEGERS
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Module
from autoconv.cpu.common.algorithm import NativeKernel
from autoconv.cpu.common.correlation import pitched
from autoconv.cpu.device import CPU
from autoconv.cpu.operators import INPUTS, OUTPUT, elementwise, resize, rows, transpose, windows, windows_last
from autoconv.cpu.operators.elements import ELEMENTS
from autoconv.cpu.operators.images import Apart
from autoconv.device import Device
from autoconv.networks.graph import Graph, Node
from autoconv.networks.operators import (
    LRN,
    Concat,
    Elementwise,
    Foreign,
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
from autoconv.networks.operators.elementwise import in_float32
from autoconv.networks.run.building import Build
from autoconv.networks.run.functions import by_numpy, function_of, named
from autoconv.networks.run.memory import Views
from autoconv.plans import Plan

if TYPE_CHECKING:
    from autoconv.cuda.codegen.source import Unit


@dataclass(frozen=True)
class Ref:
    """An array of the graph as an operand, from some byte on."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Scratch:
    """A step's scratch memory as an operand, from some byte on."""

    offset: int = 0


Operand = Ref | Scratch | Array | None


@dataclass(frozen=True)
class Call:
    """One kernel: its program, and what stands in the slots of its context.

    At most `party` threads take part, all of the device unless it is given. On a GPU the program is a `Unit`, or a
    function that launches, and the operands are its arguments.
    """

    program: compiler.Program | Unit | Callable[..., None]
    operands: tuple[Operand, ...]
    workspace_bytes: int = 0
    party: int | None = None


@dataclass(frozen=True)
class Step:
    """What computes the array of a node: kernels, or a function of arrays where there are none.

    `by` says what people want to know: the candidate of a layer, or the kind of kernel.

    What the function gives has the names of nodes: this one's, and those of others whose arrays the same call makes.
    """

    node: Node
    by: str
    calls: tuple[Call, ...] = ()
    function: Callable[..., Mapping[str, Array]] | None = field(default=None, compare=False)

    @property
    def constants(self) -> list[Array]:
        """Filters and other constants that its kernels read."""
        return [operand for call in self.calls for operand in call.operands if isinstance(operand, np.ndarray)]


def calls_of(kernel: NativeKernel, operands: Sequence[Operand]) -> tuple[Call, ...]:
    """The programs of a layer's kernel, of which these are the operands."""

    def part(taken: tuple[int, int] | None) -> Operand:
        operand, offset = (None, 0) if taken is None else (operands[taken[0]], taken[1])
        if operand is None or not offset:
            return operand
        if isinstance(operand, Ref | Scratch):
            return replace(operand, offset=operand.offset + offset)
        return operand.reshape(-1).view(np.uint8)[offset:]

    return tuple(
        Call(call.program, tuple(map(part, call.takes)), kernel.workspace_bytes, call.party) for call in kernel.calls()
    )


class StepMaker:
    """Finds kernels of a CPU for the nodes of a graph.

    Parameters
    ----------
    graph : Graph
    views : Views
    device : Device
    """

    def __init__(self, graph: Graph, views: Views, device: Device) -> None:
        self.graph, self.views, self.device = graph, views, device

    def layer_step(self, node: Node, made: Plan, kernel: Kernel, packed: Callable[[], Array]) -> Step:
        """What runs a convolution or a fully connected layer by its plan, with packed filters if they are wanted."""
        by, constant = str(made.candidate), node.inputs[1] in self.graph.constants
        if not isinstance(kernel, NativeKernel) or (kernel.packed_bytes and not constant):
            function = function_of(made, self.graph.constants.get(node.inputs[1]))
            return Step(node, by, function=named(node.name, function))
        return Step(node, by, calls_of(kernel, self._operands(node, made, kernel, packed)))

    def build(self, node: Node, made: Plan) -> Build:
        """What gives the kernel of a layer, which reads and writes where the node's arrays lie."""
        found = (self.views.pitch(name) for name in (node.inputs[0], node.name))
        pitch = (None if pitch is None else pitch // made.layer.itemsize for pitch in found)
        return Build(made, pitched(made.layer, *pitch))

    def _operands(self, node: Node, made: Plan, kernel: Kernel, packed: Callable[[], Array]) -> tuple[Operand, ...]:
        """Of a layer's kernel: input, filters, output, bias, residual and scratch memory."""
        rest = [Ref(name) for name in node.inputs[2:]]
        first = made.layer.channel_values or made.layer.quantized
        epilogue = rest[0] if first else None, rest[-1] if made.layer.residual else None
        weights = packed() if kernel.packed_bytes and node.inputs[1] in self.graph.constants else Ref(node.inputs[1])
        return Ref(node.inputs[0]), weights, Ref(node.name), *epilogue, Scratch()

    def step(self, node: Node) -> Step:
        """What runs a node."""
        if isinstance(node.operator, Foreign):
            return self._elsewhere(node, node.operator)
        types = [self.graph.types[name] for name in (*node.inputs, node.name)]
        calls = None
        if pool.available() and self._has_kernels(node.operator, {t.dtype for t in types}):
            calls = self._calls(node) if all(math.prod(t.shape) for t in types) else None
        if calls is None:
            function = by_numpy(node.operator, [t.dtype for t in types])
            return Step(node, "NumPy", function=named(node.name, function))
        return Step(node, "kernel", tuple(calls))

    def scratch_bytes(self, node: Node) -> int:
        """Scratch memory of a node that is no layer: none on a CPU."""
        del node
        return 0

    def _elsewhere(self, node: Node, operator: Foreign) -> Step:
        """What another library runs, on as many threads as the device has."""
        assert isinstance(self.device, CPU)
        run, outputs = operator.runner(self.device.threads).run, self._together[node.name]

        def function(*arrays: Array) -> dict[str, Array]:
            found = run(arrays)
            return {name: np.asarray(found[output]) for name, output in outputs.items()}

        return Step(node, operator.by, function=function)

    @functools.cached_property
    def _together(self) -> dict[str, dict[str, int]]:
        """For each output of a call of another library, those nodes that are outputs of it, and which these are."""
        last: dict[Hashable, dict[str, int]] = {}
        found = {}
        for node in self.graph.nodes.values():
            if isinstance(node.operator, Foreign):
                call = node.operator.call, node.inputs
                if node.operator.output in last.get(call, {}).values():
                    del last[call]  # this is a second call, which may draw other random numbers
                found[node.name] = last.setdefault(call, {})
                found[node.name][node.name] = node.operator.output
        return found

    def _has_kernels(self, operator: Operator, dtypes: set[str]) -> bool:
        """Whether there are kernels for arrays of such types: of float32 for all, of others for what moves elements."""
        if dtypes == {"float32"}:
            return True
        moves = isinstance(operator, Concat | Pad | Slice | Transpose) and dtypes <= {*ELEMENTS}
        if isinstance(operator, Pool):
            return operator.reduction == "max" and operator.layout == "NCHW" and dtypes <= {*INTEGERS}
        return moves or (isinstance(operator, Elementwise) and operator.dtype is not None and dtypes <= {*ELEMENTS})

    def _calls(self, node: Node) -> list[Call] | None:
        """The kernels of a node; None where there are none."""
        operator, shape = node.operator, self.graph.types[node.name].shape
        before = self.graph.types[node.inputs[0]].shape
        if isinstance(operator, Elementwise):
            strides = [broadcast(self.graph.types[n].shape, shape, self._strides(n)) for n in node.inputs]
            if len(strides) > len(INPUTS):
                return None
            out = self._strides(node.name)
            return [self._expression(operator.expression, shape, out, node, strides, node.inputs)]
        if isinstance(operator, Transpose):
            return [self._transpose(node, operator, before, shape)]
        if isinstance(operator, Slice):
            steps = contiguous(before)
            source = tuple(a * b for a, b in zip(steps, operator.steps, strict=True))
            start = sum(a * b for a, b in zip(steps, operator.starts, strict=True))
            return [self._copy(node, shape, contiguous(shape), source, start)]
        if isinstance(operator, Concat):
            return self._concat(node, operator, shape)
        if isinstance(operator, Pad):
            if self.graph.types[node.name].dtype == "int32" and float(np.float32(operator.value)) != operator.value:
                return None  # kernels compute in float32
            fill = self._expression(("constant", float(operator.value)), shape, contiguous(shape), node, [], [])
            start = sum(a * b for a, b in zip(contiguous(shape), operator.before, strict=True))
            return [fill, self._copy(node, before, contiguous(shape), contiguous(before), to=start)]
        return self._gathering(node, before, shape)

    def _gathering(self, node: Node, before: tuple[int, ...], shape: tuple[int, ...]) -> list[Call] | None:
        """Kernels of what takes many elements for one."""
        operator = node.operator
        if isinstance(operator, Pool):
            N, C, H, W = in_nchw(operator.layout, before)
            P, Q = in_nchw(operator.layout, shape)[2:]
            pool = windows.PoolShape(
                operator.reduction, N * C, (H, W), (P, Q),
                operator.window, operator.stride, operator.padding, operator.dilation, operator.include_padding,
                self.graph.types[node.name].dtype, self._apart(node, C),
            )  # fmt: skip
            if operator.layout == "NHWC":
                return [self._call(windows_last.emit, (pool, C), node)]
            if 4 * pool.row_elements(16) > windows.MOST_SCRATCH:
                return None
            return [self._call(windows.emit, (pool,), node)]
        if isinstance(operator, Reduce) and (len(before), operator.axes) == (4, (1, 2)) and operator.reduction != "sum":
            (N, H, W, C), none = before, ((0, 0), (0, 0))
            pool = windows.PoolShape(operator.reduction, N * C, (H, W), (1, 1), (H, W), (1, 1), none, (1, 1), False)
            return [self._call(windows_last.emit, (pool, C), node)]
        if isinstance(operator, Reduce):
            kept = [n for n, extent in enumerate(before) if extent != 1 and n not in operator.axes]
            gone = [n for n in operator.axes if before[n] != 1] or [len(before)]
            if any(min(gone) < n < max(gone) for n in kept):
                return None
            inner = math.prod(before[max(gone) + 1 :])
            args = operator.reduction, math.prod(shape) // inner, math.prod(before) // math.prod(shape)
            if inner == 1:
                return [self._call(rows.emit_reduction, args, node)]
            return [self._call(rows.emit_columns, (*args, inner), node)]
        if isinstance(operator, Softmax):
            matrices, inner = math.prod(shape[: operator.axis]), math.prod(shape[operator.axis + 1 :])
            length = shape[operator.axis]
            if inner == 1:
                return [self._call(rows.emit_softmax, (matrices, length), node)]
            return [self._call(rows.emit_softmax_of_columns, (matrices, length, inner), node)]
        if isinstance(operator, Normalization):
            return [self._normalization(node, operator, before)]
        if isinstance(operator, LRN):
            extents = shape[0], shape[1], math.prod(shape[2:])
            constants = operator.size, operator.alpha, operator.beta, operator.bias
            return [self._call(rows.emit_lrn, (*extents, *constants), node)]
        if isinstance(operator, Resize):
            axis = operator.axis
            sizes = math.prod(shape[:axis]), before[axis], math.prod(shape[axis + 1 :])
            apart = self._apart(node, math.prod(shape[1:axis]))
            if by_row := resize.rows_of(self._instruction_set, *sizes, operator.indices, operator.weights):
                return [self._call(resize.emit_rows, (by_row._replace(apart=apart),), node)]
            places = np.ascontiguousarray(operator.indices, np.int64)
            weights = np.ascontiguousarray(operator.weights, np.float32)
            found = self._call(resize.emit, (*sizes, *places.shape, apart), node)
            operands = found.operands[0], places, found.operands[2], weights, *found.operands[4:]
            return [Call(found.program, operands)]
        return None

    def _normalization(self, node: Node, operator: Normalization, shape: tuple[int, ...]) -> Call:
        """A kernel of the input, and perhaps a scale and a shift."""
        args = *operator.rows(shape), operator.epsilon, operator.centred, operator.affine, self._period(node, operator)
        program = compiler.build(rows.emit_normalization, self._instruction_set, *args)
        x, scale, shift = (*map(Ref, node.inputs), None, None)[:3]
        return Call(program, (x, scale, Ref(node.name), shift, None, None))

    def _period(self, node: Node, operator: Normalization) -> int:
        """How many numbers its scale and its shift have."""
        return self.graph.types[node.inputs[-1]].shape[0] if operator.affine else 1

    @property
    def _instruction_set(self) -> str:
        assert isinstance(self.device, CPU)
        return self.device.instruction_set

    def _call(self, emit: Callable[..., Module], args: tuple[object, ...], node: Node) -> Call:
        """A kernel of one input."""
        program = compiler.build(emit, self._instruction_set, *args)
        return Call(program, (Ref(node.inputs[0]), None, Ref(node.name), None, None, None))

    def _expression(
        self,
        expression: object,
        shape: tuple[int, ...],
        out: Strides,
        node: Node,
        strides: Sequence[Strides],
        inputs: Sequence[str],
        start: int = 0,
        to: int = 0,
    ) -> Call:
        """A kernel that stores an expression of the first input from element `start` on, to the output from `to` on."""
        sizes, steps = collapsed(shape, [out, *strides])
        types = tuple(self.graph.types[name].dtype for name in (node.name, *inputs))
        computed = in_float32(expression)
        program = compiler.build(elementwise.emit, self._instruction_set, computed, sizes, steps, types)
        bytes_of = [ELEMENTS[dtype].bytes for dtype in types]
        operands: list[Ref | None] = [None] * 6
        operands[OUTPUT] = Ref(node.name, bytes_of[0] * to)
        for n, (slot, name) in enumerate(zip(INPUTS, inputs, strict=False)):
            operands[slot] = Ref(name, bytes_of[1] * start if n == 0 else 0)
        return Call(program, tuple(operands))

    def _copy(
        self, node: Node, shape: tuple[int, ...], out: Strides, source: Strides, start: int = 0, to: int = 0
    ) -> Call:
        return self._expression(0, shape, out, node, [source], node.inputs[:1], start, to)

    def _transpose(self, node: Node, operator: Transpose, before: tuple[int, ...], shape: tuple[int, ...]) -> Call:
        """Matrices are transposed in blocks; other orders of dimensions are copies by strides."""
        steps = contiguous(before)
        source = tuple(steps[axis] for axis in operator.order)
        sizes, (out, inner) = collapsed(shape, [contiguous(shape), source])
        matrices, (columns, rows) = math.prod(sizes[:-2]), (1, *sizes)[-2:]
        call = None
        if inner[-2:] == (1, columns) and inner[:-2] == out[:-2] and len(sizes) <= 3:
            call = self._transposed_matrices(node, matrices, rows, columns)
        return call or self._copy(node, shape, contiguous(shape), source)

    def _transposed_matrices(self, node: Node, matrices: int, rows: int, columns: int) -> Call | None:
        """A kernel that transposes matrices that follow one another; None where there is none for their type."""
        if self.graph.types[node.name].dtype != "float32":
            return None
        return self._call(transpose.emit, (matrices, rows, columns), node)

    def _strides(self, name: str) -> Strides:
        """Of an array as it lies, in elements."""
        found, pitch = self.graph.types[name], self.views.pitch(name)
        steps = contiguous(found.shape)
        return steps if pitch is None else (pitch * math.prod(found.shape) // found.nbytes, *steps[1:])

    def _apart(self, node: Node, planes: int) -> Apart | None:
        """How images of so many planes lie in a node's input and output, where either lie apart."""
        names = node.inputs[0], node.name
        pitched = any(self.views.pitch(name) is not None for name in names)
        return Apart(planes, *(self._strides(name)[0] for name in names)) if pitched else None

    def _concat(self, node: Node, operator: Concat, shape: tuple[int, ...]) -> list[Call]:
        """Copies of those parts that are not computed in their place."""
        calls, done, steps = [], 0, self._strides(node.name)
        for n, name in enumerate(node.inputs):
            part = self.graph.types[name].shape
            if self.views.within(node, n) is None:
                to = done * steps[operator.axis]
                calls.append(self._expression(0, part, steps, node, [self._strides(name)], [name], to=to))
            done += part[operator.axis]
        return calls
