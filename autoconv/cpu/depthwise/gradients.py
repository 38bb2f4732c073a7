"""The gradient of a depthwise layer's filters, in NCHW: neighbouring pixels are lanes, taps are sums in registers.

A row of the input meets TP rows of dy while it is read once, from a panel of it that is padded and, for strided
layers, deinterleaved by residue, as in `depthwise`. All images of a channel are one task, so that its sums stay in
registers; of few channels, `slices` of the images are summed apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, VECTOR_REGISTERS, Function, Module, Value, Var, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import correlations
from autoconv.cpu.common.estimate import operands_once, side_by_side
from autoconv.cpu.common.panel import in_lines, strides_too_wide
from autoconv.cpu.common.sums import SUM_TERMS, kept_aside
from autoconv.cpu.depthwise.geometry import DepthwiseTiling, RowBlocking
from autoconv.cpu.depthwise.kernels import fill
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

SPARE = 6  # registers for rows of dy and the input
HEIGHTS = (2, 3, 4, 6)
MOST_COLUMNS = 10  # taps of a row, whose sums are in registers together
MOST_TAPS = 128

Sums: TypeAlias = dict[tuple[int, int], Var]  # by tap
Keep: TypeAlias = Callable[[], None] | None  # what keeps them aside, where there are many terms


def _tiling(layer: ConvLayer, device: CPU, TP: int) -> DepthwiseTiling:
    """Panels as of the forward pass, of half the L1 cache."""
    wide = widened(DTYPES[layer.dtype])
    lanes = VECTOR_BYTES[device.instruction_set] // wide.bytes
    blocking = RowBlocking(TP, 1, False, device.threads, device.machine.caches[0])
    forward = correlations(layer.replace(direction="fwd"))
    tiling = DepthwiseTiling.of(forward, lanes, wide.bytes, blocking)
    together = max(1, tiling.together * tiling.TP // TP)
    return tiling._replace(looped=False, TP=TP, blocks=-(-layer.P // TP), together=together)


def _slices(layer: ConvLayer, device: CPU) -> int:
    """Into how many parts images are cut: enough for the threads, where filters are few."""
    return max(1, min(layer.N, -(-4 * device.threads // layer.K)))


@dataclass(frozen=True)
class _WgradWriter:
    """Writes the task of one filter and slice of images."""

    m: Module
    layer: ConvLayer
    tiling: DepthwiseTiling
    threads: int
    slices: int

    def emit(self) -> Function:
        """`run`."""
        layer = self.layer
        run = self.m.function("run", *RUN)
        launch(run, run.args[0], self._task(), layer.K * self.slices)
        if self.slices > 1:
            launch(run, run.args[0], self._finish(), 1)
        return run

    def _task(self) -> Function:
        """A filter's gradient over a slice of the images: to dw, or to the slice's part of the workspace."""
        layer, tiling, lanes = self.layer, self.tiling, self.tiling.panel.lanes
        element = DTYPES[layer.dtype]
        wide = widened(element)
        c = tiling.problem
        taps = layer.R * layer.S
        k = self.m.function("task", *TASK, internal=True)
        context, index, thread = k.args
        x, dy, dw, _, _, workspace = operands(k, context, element)
        filter_, slice_ = index % layer.K, index // layer.K
        panel = k.bytes_at(workspace, thread * (tiling.elements * wide.bytes), wide)
        x = x + filter_ // c.K * c.input.channel
        dy = dy + filter_ * c.output.channel
        partial = self._partial(k, workspace) + index * taps
        at_once = max(1, (VECTOR_REGISTERS[self.m.instruction_set] - SPARE) // layer.S)
        rows = tiling.together * tiling.TP
        for first in range(0, layer.R, at_once):
            chosen = range(first, min(first + at_once, layer.R))
            sums: Sums = {(r, s): k.var(k.zero(wide, lanes)) for r in chosen for s in range(layer.S)}
            images = slice_ * layer.N // self.slices, (slice_ + 1) * layer.N // self.slices
            aside = kept_aside(k, list(sums.values()), lanes) if self._parted() else nullcontext()
            with aside as keep, k.loop(*images) as n, k.loop(0, layer.P, rows) as p:
                fill(k, tiling, x + n * c.input.image, p * c.rows.stride + c.rows.offset, panel, ahead=False)
                here = dy + n * c.output.image + p * layer.Q
                self._add_rows(k, sums, panel, here, k.min(layer.P - p, rows), keep)
                if keep is not None:
                    keep()
            for (r, s), total in sums.items():
                tap = r * layer.S + s
                target = dw + filter_ * taps + tap if self.slices == 1 else partial + tap
                k.store(k.sum(total.get()), target)
        return k

    def _parted(self) -> bool:
        """Whether images have more terms than should be added up in a row."""
        layer = self.layer
        return -(-layer.N // self.slices) * layer.P * -(-layer.Q // self.tiling.panel.lanes) > SUM_TERMS

    def _partial(self, k: Function, workspace: Value) -> Value:
        """The slices' gradients, behind the threads' panels."""
        wide = widened(DTYPES[self.layer.dtype])
        return k.bytes_at(workspace, self.threads * self.tiling.elements * wide.bytes, wide)

    def _add_rows(self, k: Function, sums: Sums, panel: Value, dy: Value, count: Value, keep: Keep) -> None:
        """So many rows of dy: whole blocks, and then one by one."""
        step, pitch, TP = self.tiling.problem.rows.stride, self.tiling.panel.pitch, self.tiling.TP
        whole = count // TP * TP
        with k.loop(0, whole, TP) as p:
            self._add_block(k, sums, panel + p * (step * pitch), dy + p * self.layer.Q, TP, keep)
        with k.loop(whole, count) as p:
            self._add_block(k, sums, panel + p * (step * pitch), dy + p * self.layer.Q, 1, keep)

    def _add_block(self, k: Function, sums: Sums, panel: Value, dy: Value, TP: int, keep: Keep) -> None:
        """TP rows of dy, vector by vector; a row of the panel is read once for all that see it."""
        lanes, Q = self.tiling.panel.lanes, self.layer.Q
        rows = self.tiling.problem.rows
        meetings: dict[int, list[tuple[int, int]]] = {}
        for i in range(TP):
            for r in sorted({r for r, _ in sums}):
                meetings.setdefault(i * rows.stride + r * rows.dilation, []).append((i, r))

        def vector(q: int | Value, width: int) -> None:
            mask = k.mask(width, lanes)  # lanes beyond the row are zero in both
            gradients = [k.load(dy + (i * Q + q), lanes, mask=mask) for i in range(TP)]
            for t in sorted(meetings):
                for s in range(self.layer.S):
                    place = panel + (t * self.tiling.panel.pitch + self.tiling.panel.offset(s)) + q
                    pixels = k.load(place, lanes, mask=mask)
                    for i, r in meetings[t]:
                        sums[r, s].fma(gradients[i], pixels)

        whole, most = Q // lanes * lanes, SUM_TERMS // TP * lanes
        if keep is not None and whole > most:
            with k.loop(0, whole, most) as first:
                with k.loop(first, k.min(first + most, whole), lanes) as q:
                    vector(q, lanes)
                keep()
        elif whole:
            with k.loop(0, whole, lanes) as q:
                vector(q, lanes)
        if Q % lanes:
            vector(Q // lanes * lanes, Q % lanes)

    def _finish(self) -> Function:
        """The sum over the slices."""
        size = self.layer.K * self.layer.R * self.layer.S
        k = self.m.function("finish", *TASK, internal=True)
        _, _, dw, _, _, workspace = operands(k, k.args[0], DTYPES[self.layer.dtype])
        partial = self._partial(k, workspace)
        with k.loop(0, size) as i:
            total = k.load(partial + i)
            for slice_ in range(1, self.slices):
                total = total + k.load(partial + (slice_ * size) + i)
            k.store(total, dw + i)
        return k


def emit(instruction_set: str, layer: ConvLayer, tiling: DepthwiseTiling, threads: int, slices: int) -> Module:
    """`run` of a gradient of the filters: operand a is x, b is dy, out is dw."""
    m = Module(instruction_set)
    _WgradWriter(m, layer, tiling, threads, slices).emit()
    return m


class DepthwiseWgrad(GeneratedAlgorithm):
    """The gradient of a depthwise layer's filters: blocks of `TP` rows of dy by a vector of columns.

    Sources: Zhang, Lo and Lu, "High performance depthwise and pointwise convolutions on mobile devices" (2020),
    arXiv:2001.02504, for rows of the input that are read once while they meet all taps in registers. Their kernels are
    for the forward pass; here the sums in registers are those of the taps.
    """

    name = "depthwise.wgrad"
    directions = ("wgrad",)
    layouts = ("NCHW",)
    groupings = ("depthwise",)
    exact = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if layer.S > MOST_COLUMNS:
            reasons.append(f"S={layer.S}: expected at most {MOST_COLUMNS} taps in a row, whose sums are in registers")
        if (taps := layer.R * layer.S) > MOST_TAPS:
            reasons.append(f"R={layer.R}, S={layer.S}: expected at most {MOST_TAPS} taps, written out, got {taps}")
        return reasons + strides_too_wide(layer)

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [{"TP": TP} for TP in HEIGHTS]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if params["TP"] not in HEIGHTS:
            return [f"TP={params['TP']}: expected {' or '.join(map(str, HEIGHTS))}"]
        return []

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        slices = _slices(layer, device)
        sums = slices * layer.K * layer.R * layer.S if slices > 1 else 0
        elements = device.threads * _tiling(layer, device, int(params["TP"])).elements + in_lines(sums)
        return elements * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """A row of dy is loaded once for all taps, and every row of x for each tap of a row and row of dy."""
        machine, size = device.machine, layer.accumulator.itemsize
        lanes = VECTOR_BYTES[device.instruction_set] // size
        width = layer.y_shape[-1]
        products = layer.flops / (2 * width) * math.ceil(width / lanes)
        loads = products * (1 / min(int(params["TP"]), layer.R) + 1 / (layer.R * layer.S))
        multiply = machine.multiply_adds(device.instruction_set, layer.accumulator.name, lanes)
        computed = max(products / multiply, loads / machine.loads(lanes * size)) / machine.threads
        return side_by_side(computed, operands_once(layer, machine)) + (machine.call or 0.0)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        tiling = _tiling(layer, device, int(params["TP"]))
        return compiler.build(emit, device.instruction_set, layer, tiling, device.threads, _slices(layer, device))
