"""The gradient of a strided layer's input as one convolution of unit stride, which another algorithm computes.

Inputs whose padded position has the same residue modulo the stride see the same taps, and neighbours among them
see neighbouring outputs. With a channel for every residue ("phase") the gradient is a convolution of dy, whose
filters are the layer's dealt out by residue, in reverse; its output is woven together into dx in a second pass, by
whole vectors. (The sub-pixel convolution of Shi et al., arXiv:1609.05158, is the same thing the other way round.)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Value
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, correlations
from autoconv.cpu.common.lanes import interleaved_in_turn, within
from autoconv.cpu.device import CPU
from autoconv.cpu.pool import Entry
from autoconv.layer import ConvLayer

MOST_WASTE = 2.0  # multiply-adds, including those with taps that some phases lack, for each that counts
MOST_PHASES = 4096
MOST_VECTORS = 8  # woven together: columns of a larger stride are stored one by one


@dataclass(frozen=True)
class Side:
    """One axis: phase b of outputs j has the inputs `stride * (first + j) + b - pad`, tap t is `b + stride * t`."""

    size: int
    extent: int
    stride: int
    pad: int
    outputs: int

    @property
    def taps(self) -> int:
        """Of a phase, the shorter ones filled up with zeros."""
        return -(-self.extent // self.stride)

    @property
    def first(self) -> int:
        """The first j of an input."""
        return self.pad // self.stride

    @property
    def count(self) -> int:
        """Outputs of a phase, some of which may lie outside."""
        return (self.pad + self.size - 1) // self.stride - self.first + 1

    @property
    def padding(self) -> tuple[int, int]:
        """Of dy; negative where there are outputs that see no input."""
        before = self.taps - 1 - self.first
        return before, self.count - 1 + self.taps - self.outputs - before


def sides(layer: ConvLayer) -> tuple[Side, Side]:
    """Both axes."""
    return (
        Side(layer.H, layer.R, layer.stride[0], layer.padding[0][0], layer.P),
        Side(layer.W, layer.S, layer.stride[1], layer.padding[1][0], layer.Q),
    )


def phased(layer: ConvLayer) -> ConvLayer:
    """The convolution of dy with a channel for every phase: of a group, all channels of one phase after the other."""
    rows, columns = sides(layer)
    return layer.replace(
        direction="fwd",
        C=layer.K,
        H=layer.P,
        W=layer.Q,
        K=layer.C * rows.stride * columns.stride,
        R=rows.taps,
        S=columns.taps,
        stride=(1, 1),
        padding=(rows.padding, columns.padding),
    )


class _Writer:
    """Writes what deals out the filters, and what weaves the phases."""

    def __init__(self, m: Module, layer: ConvLayer) -> None:
        self.m, self.layer = m, layer
        self.rows, self.columns = sides(layer)
        self.phases = self.rows.stride * self.columns.stride
        self.C = layer.C // layer.groups
        (self.inner,) = correlations(phased(layer))
        (self.outer,) = correlations(layer.replace(direction="fwd"))
        self.element = DTYPES[layer.dtype]

    def emit(self) -> None:
        """`pack` of filters, and `run`."""
        k = self.m.function("pack", *RUN)
        launch(k, k.args[0], self._deal(), self.layer.C * self.phases)
        k = self.m.function("run", *RUN)
        weave = self._weave_channels() if self.layer.layout == "NHWC" else self._weave_pixels()
        rows = self.layer.H if self.layer.layout == "NHWC" else self.layer.C
        launch(k, k.args[0], weave, self.layer.N * rows)

    def _deal(self) -> Function:
        """One filter of the phased layer: taps of its residue, in reverse, with zeros where there are none."""
        k = self.m.function("deal", *TASK, internal=True)
        context, index, _ = k.args
        w, _, out = operands(k, context, self.element)[:3]
        source, target = self.outer.filters, self.inner.filters
        group, rest = index // (self.C * self.phases), index % (self.C * self.phases)
        phase, c = rest // self.C, rest % self.C
        down, across = phase // self.columns.stride, phase % self.columns.stride
        w = w + group * source.group + c * source.c
        out = out + index * target.k
        with k.loop(0, self.inner.C) as kk, k.loop(0, self.rows.taps) as i, k.loop(0, self.columns.taps) as j:
            r = (self.rows.taps - 1 - i) * self.rows.stride + down
            s = (self.columns.taps - 1 - j) * self.columns.stride + across
            one = k.var(k.const(k.load(w).type, 0))
            with k.if_((r < self.layer.R) & (s < self.layer.S)):
                one.set(k.load(w + kk * source.k + r * source.r + s * source.s))
            k.store(one.get(), out + kk * target.c + i * target.r + j * target.s)
        return k

    def _row(self, images: Value, n: Value, channel: Value, h: Value) -> Value:
        """Where the phases of a row of dx start; `channel` is one of dx."""
        y: Correlation = self.inner
        u = h + self.rows.pad
        j, down = u // self.rows.stride - self.rows.first, u % self.rows.stride
        first = channel // self.C * (self.C * self.phases) + channel % self.C
        first = first + down * (self.columns.stride * self.C)
        return images + n * y.output.image + first * y.output.channel + j * y.output.row

    def _weave_pixels(self) -> Function:
        """A plane of dx in NCHW: its rows' phases, interleaved."""
        layer, x = self.layer, self.outer.input
        k = self.m.function("weave", *TASK, internal=True)
        context, index, _ = k.args
        images, _, dx = operands(k, context, self.element)[:3]
        n, c = index // layer.C, index % layer.C
        dx = dx + n * x.image + c * x.channel
        weave = self._by_vectors if self.columns.stride <= MOST_VECTORS else self._one_by_one
        with k.loop(0, layer.H) as h:
            weave(k, self._row(images, n, c, h), dx + h * x.row)
        return k

    def _by_vectors(self, k: Function, row: Value, dx: Value) -> None:
        step, lanes, W = self.columns.stride, self.m.lanes(self.element), self.layer.W
        with k.loop(0, self.columns.count, lanes) as i:
            mask = k.mask(self.columns.count - i, lanes)
            apart = self.C * self.inner.output.channel
            vectors = [k.load(row + b * apart + i, lanes, mask=mask) for b in range(step)]
            w = (i + self.columns.first) * step - self.columns.pad
            for part, v in enumerate(interleaved_in_turn(k, vectors)):
                here = w + part * lanes
                with k.if_((here >= 0) & (here <= W - lanes)):
                    k.store(v, dx + here)
                with k.else_():
                    k.store(v, dx + here, mask=within(k, here, lanes, k.i64(W)))

    def _one_by_one(self, k: Function, row: Value, dx: Value) -> None:
        step, columns = self.columns.stride, self.columns
        with k.loop(0, step) as b:
            w = b + (columns.first * step - columns.pad)
            low = (step - 1 - w) // step  # 1 where output 0 lies outside
            high = k.min((self.layer.W + step - 1 - w) // step, columns.count)
            phase = row + b * (self.C * self.inner.output.channel)
            with k.loop(low, high) as i:
                k.store(k.load(phase + i), dx + w + i * step)

    def _weave_channels(self) -> Function:
        """A row of dx in NHWC: every pixel's channels from its phase."""
        layer, lanes = self.layer, self.m.lanes(self.element)
        x, y = self.outer.input, self.inner.output
        k = self.m.function("weave", *TASK, internal=True)
        context, index, _ = k.args
        images, _, dx = operands(k, context, self.element)[:3]
        n, h = index // layer.H, index % layer.H
        dx = dx + n * x.image + h * x.row
        with k.loop(0, layer.groups) as group:
            row = self._row(images, n, group * self.C, h)
            with k.loop(0, layer.W) as w:
                u = w + self.columns.pad
                i, across = u // self.columns.stride - self.columns.first, u % self.columns.stride
                source = row + i * y.column + across * self.C
                target = dx + w * x.column + group * self.C
                with k.loop(0, self.C, lanes) as c:
                    mask = None if self.C % lanes == 0 else k.mask(self.C - c, lanes)
                    k.store(k.load(source + c, lanes, mask=mask), target + c, mask=mask)
        return k


def emit(instruction_set: str, layer: ConvLayer) -> Module:
    """`pack`, from the filters to those of the phased layer, and `run`, from its output to dx."""
    m = Module(instruction_set)
    _Writer(m, layer).emit()
    return m


class PolyphaseKernel(Kernel):
    """Another algorithm's kernel between the two passes, some images at a time.

    Packed filters have room for those of the phased layer.
    """

    def __init__(
        self, program: compiler.Program, threads: int, inner: Kernel, together: int, filters: int, images: int
    ) -> None:
        self._inner, self._together = inner, together
        self._deal, self._weave = Entry(program, "pack", threads), Entry(program, "run", threads)
        self.packed_bytes, self.workspace_bytes = inner.packed_bytes + filters, inner.workspace_bytes + images

    def pack(self, w: Array, packed: Array) -> None:
        filters = packed[self._inner.packed_bytes :]
        self._deal(w, None, filters)
        if self._inner.packed_bytes:
            self._inner.pack(filters, packed[: self._inner.packed_bytes])

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        images = workspace[self._inner.workspace_bytes :]
        for n in range(0, len(a), self._together):
            self._inner.run(a[n : n + self._together], b, images, None, None, workspace)
            self._weave(images, None, out[n : n + self._together])


class Polyphase(Algorithm[CPU]):
    """dgrad of strided layers by another algorithm's forward pass, whose candidates these are."""

    directions = ("dgrad",)
    dilated = False  # neighbouring taps would be of different phases
    pool = "autoconv"
    spreads_nonfinite = True  # taps that a phase lacks are zeros, and multiplied

    @property
    @abstractmethod
    def inner(self) -> Algorithm[CPU]:
        """What computes the phased layer."""

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return (
            [] if self.unsupported(layer) or _unfit(layer) else self.inner.candidates(_piece(layer, device)[1], device)
        )

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = _unfit(layer)
        if layer.groups == layer.C and self.inner.name != "depthwise":
            reasons.append("a single channel in a group: depthwise.polyphase has lanes for it")
        return reasons or self.inner.why_not(_piece(layer, device)[1], device, params)

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        inner = _piece(layer, device)[1]
        return self.inner.workspace_bytes(inner, device, params) + _lines(inner.y_shape, layer.itemsize)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        inner = _piece(layer, device)[1]
        return self.inner.packed_bytes(inner, device, params) + _lines(inner.w_shape, layer.itemsize)

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        piece, inner = _piece(layer, device)
        woven = _lines(inner.y_shape, layer.itemsize) + _lines(layer.x_shape, layer.itemsize)
        return layer.N / piece.N * self.inner.estimate(inner, device, params) + woven / device.bandwidth()

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return self.inner.bound(phased(layer), params)

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        piece, inner = _piece(layer, device)
        program = compiler.build(emit, device.instruction_set, piece)
        sizes = _lines(inner.w_shape, layer.itemsize), _lines(inner.y_shape, layer.itemsize)
        return PolyphaseKernel(program, device.threads, self.inner.build(inner, device, params), piece.N, *sizes)


def _piece(layer: ConvLayer, device: CPU) -> tuple[ConvLayer, ConvLayer]:
    """As many of its images as are woven while they are in the last cache; and the phased layer of them."""
    one = phased(layer.replace(N=1))
    fit = [n for n in range(1, layer.N + 1) if layer.N % n == 0]
    room = device.facts["l3_bytes"] // 4 // _lines(one.y_shape, layer.itemsize)
    together = max((n for n in fit if n <= room), default=1)
    return layer.replace(N=together), one.replace(N=together)


def _lines(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an array in whole cache lines."""
    return -(-math.prod(shape) * itemsize // LINE) * LINE


def _unfit(layer: ConvLayer) -> list[str]:
    """Every reason against any inner algorithm."""
    reasons = []
    if layer.stride == (1, 1):
        reasons.append("stride 1x1: there is one phase")
        return reasons
    rows, columns = sides(layer)
    if min(*rows.padding, *columns.padding) < 0:
        reasons.append("there are outputs that see no input")
    if (waste := rows.stride * rows.taps * columns.stride * columns.taps / (layer.R * layer.S)) > MOST_WASTE:
        reasons.append(f"phases of {rows.taps}x{columns.taps} taps: {waste:.1f} times as many as the filter has")
    if rows.stride * columns.stride > MOST_PHASES:
        reasons.append(f"stride {rows.stride}x{columns.stride}: too many phases to weave")
    return reasons
