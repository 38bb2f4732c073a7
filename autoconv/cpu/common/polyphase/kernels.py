"""The two passes around the convolution of unit stride: deinterleaved filters, and interleaved components of dx."""

from __future__ import annotations

import functools

from autoconv.cpu.codegen.ir import DTYPES, VECTOR_REGISTERS, Function, Module, Value
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.correlation import Correlation, correlations, pitched, pitches
from autoconv.cpu.common.epilogue import Epilogue, OfChannels
from autoconv.cpu.common.lanes import interleaved_in_turn, within
from autoconv.cpu.common.polyphase.geometry import polyphase_axes, unit_stride_layer
from autoconv.layer import ConvLayer


def most_interleaved(instruction_set: str) -> int:
    """Vectors that are interleaved in registers, of which every step needs twice as many."""
    return VECTOR_REGISTERS[instruction_set] // 2


class _PassWriter:
    """Writes what deinterleaves the filters, and what interleaves the components."""

    def __init__(self, m: Module, layer: ConvLayer) -> None:
        self.m, self.layer = m, layer
        self.rows, self.columns = polyphase_axes(layer)
        self.components = self.rows.stride * self.columns.stride
        self.C = layer.C // layer.groups
        (self.inner,) = correlations(unit_stride_layer(layer))
        (self.outer,) = correlations(pitched(layer).replace(direction="fwd"))
        self.dx = self.outer.input._replace(image=pitches(layer)[1])
        self.element = DTYPES[layer.dtype]
        self.epilogue = Epilogue.of(layer)

    def emit(self) -> None:
        """`pack` of filters, and `run`."""
        k = self.m.function("pack", *RUN)
        launch(k, k.args[0], self._deinterleave(), self.layer.C * self.components)
        k = self.m.function("run", *RUN)
        interleave = self._interleave_channels() if self.layer.layout == "NHWC" else self._interleave_pixels()
        rows = self.layer.H if self.layer.layout == "NHWC" else self.layer.C
        launch(k, k.args[0], interleave, self.layer.N * rows)

    def _deinterleave(self) -> Function:
        """One filter of a component: the taps of its residue, in reverse, with zeros where there are none."""
        k = self.m.function("deinterleave", *TASK, internal=True)
        context, index, _ = k.args
        w, _, out = operands(k, context, self.element)[:3]
        source, target = self.outer.filters, self.inner.filters
        group, rest = index // (self.C * self.components), index % (self.C * self.components)
        component, c = rest // self.C, rest % self.C
        down, across = component // self.columns.stride, component % self.columns.stride
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
        """Where the components of a row of dx start; `channel` is one of dx."""
        y: Correlation = self.inner
        u = h + self.rows.pad
        j, down = u // self.rows.stride - self.rows.first, u % self.rows.stride
        first = channel // self.C * (self.C * self.components) + channel % self.C
        first = first + down * (self.columns.stride * self.C)
        return images + n * y.output.image + first * y.output.channel + j * y.output.row

    def _interleave_pixels(self) -> Function:
        """A plane of dx in NCHW: the components of its rows, interleaved."""
        layer, x = self.layer, self.dx
        k = self.m.function("interleave", *TASK, internal=True)
        context, index, _ = k.args
        images, _, dx, bias, residual = operands(k, context, self.element)[:5]
        n, c = index // layer.C, index % layer.C
        place = n * x.image + c * x.channel
        in_registers = self.columns.stride <= most_interleaved(self.m.instruction_set)  # else stored one by one
        interleave = self._by_vectors if in_registers else self._one_by_one
        with k.loop(0, layer.H) as h:
            here = place + h * x.row
            interleave(k, self._row(images, n, c, h), dx + here, bias + c, residual + here)
        return k

    def _by_vectors(self, k: Function, row: Value, dx: Value, bias: Value, residual: Value) -> None:
        stride, lanes, W = self.columns.stride, self.m.lanes(self.element), self.layer.W
        of_channel = self.epilogue.of_channels(lambda place: k.broadcast(place, lanes), bias)
        with k.loop(0, self.columns.count, lanes) as i:
            mask = k.mask(self.columns.count - i, lanes)
            apart = self.C * self.inner.output.channel
            vectors = [k.load(row + b * apart + i, lanes, mask=mask) for b in range(stride)]
            w = (i + self.columns.first) * stride - self.columns.pad
            for part, v in enumerate(interleaved_in_turn(k, vectors)):
                here = w + part * lanes
                with k.if_((here >= 0) & (here <= W - lanes)):
                    self._store(k, v, dx + here, of_channel, residual + here)
                with k.else_():
                    self._store(k, v, dx + here, of_channel, residual + here, within(k, here, lanes, k.i64(W)))

    def _store(
        self, k: Function, v: Value, dx: Value, of_channels: OfChannels, residual: Value, mask: Value | None = None
    ) -> None:
        """Store sums with their epilogue: a vector of them, or a single one."""
        r = k.load(residual, v.type.lanes, mask=mask) if self.epilogue.residual else None
        k.store(self.epilogue.apply(k, v, of_channels, r), dx, mask=mask)

    def _one_by_one(self, k: Function, row: Value, dx: Value, bias: Value, residual: Value) -> None:
        columns, stride = self.columns, self.columns.stride
        of_channel = self.epilogue.of_channels(k.load, bias)
        with k.loop(0, stride) as b:
            w = b + (columns.first * stride - columns.pad)
            low = (stride - 1 - w) // stride  # 1 where output 0 lies outside
            high = k.min((self.layer.W + stride - 1 - w) // stride, columns.count)
            component = row + b * (self.C * self.inner.output.channel)
            with k.loop(low, high) as i:
                here = w + i * stride
                self._store(k, k.load(component + i), dx + here, of_channel, residual + here)

    def _interleave_channels(self) -> Function:
        """A row of dx in NHWC: every pixel's channels from its component."""
        layer, lanes = self.layer, self.m.lanes(self.element)
        x, y = self.dx, self.inner.output
        k = self.m.function("interleave", *TASK, internal=True)
        context, index, _ = k.args
        images, _, dx, bias, residual = operands(k, context, self.element)[:5]
        n, h = index // layer.H, index % layer.H
        place = n * x.image + h * x.row
        dx, residual = dx + place, residual + place
        with k.loop(0, layer.groups) as group:
            row = self._row(images, n, group * self.C, h)
            with k.loop(0, layer.W) as w:
                u = w + self.columns.pad
                i, across = u // self.columns.stride - self.columns.first, u % self.columns.stride
                source = row + i * y.column + across * self.C
                target = w * x.column + group * self.C
                with k.loop(0, self.C, lanes) as c:
                    mask = None if self.C % lanes == 0 else k.mask(self.C - c, lanes)
                    load = functools.partial(k.load, lanes=lanes, mask=mask)
                    of_channels = self.epilogue.of_channels(load, bias + group * self.C + c)
                    self._store(k, load(source + c), dx + target + c, of_channels, residual + target + c, mask)
        return k


def emit(instruction_set: str, layer: ConvLayer) -> Module:
    """`pack`, from the filters to those of the unit-stride layer, and `run`, from its output to dx."""
    m = Module(instruction_set)
    _PassWriter(m, layer).emit()
    return m
