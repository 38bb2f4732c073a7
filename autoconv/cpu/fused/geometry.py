"""Which layers one kernel computes, and how their work is cut: strips of rows, and hidden channels at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, VECTOR_REGISTERS
from autoconv.cpu.common.correlation import correlations, pitched
from autoconv.cpu.common.grid import largest_divisor, register_tiles
from autoconv.cpu.common.panel import MOST_STRIDE, PanelRow, pitch_of
from autoconv.cpu.depthwise.geometry import UNROLLED_TAPS
from autoconv.cpu.depthwise.kernels_inplace import zeros_elements
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm.geometry import GemmBlocking, PanelCut
from autoconv.layer import ConvLayer

MOST_HEIGHTS = 3  # of strips that are tried
MOST_CHANNELS = 16, 48  # at a time, of those that are tried


@dataclass(frozen=True)
class FusedLayers:
    """A depthwise layer with the layer before it, the 1x1 layer after it, or both, each taking what the last computes.

    Parameters
    ----------
    before : ConvLayer or None
        Of one group: a 1x1 layer, or one of larger filters or with a stride, as a network's first layer.
    depthwise : ConvLayer
    after : ConvLayer or None
    """

    before: ConvLayer | None
    depthwise: ConvLayer
    after: ConvLayer | None

    @property
    def roles(self) -> dict[str, ConvLayer]:
        """Those there are, in order, by what they are here."""
        return {field.name: layer for field in fields(self) if (layer := getattr(self, field.name)) is not None}

    @property
    def layers(self) -> list[ConvLayer]:
        """Those there are, in order."""
        return list(self.roles.values())

    def apart(self, input_pitch: int | None, output_pitch: int | None) -> FusedLayers:
        """The same with images of the first input and of the last output that many elements apart, as in larger arrays.

        None is for images without a gap.
        """
        (first, head), *_, (last, tail) = self.roles.items()
        return replace(self, **{first: pitched(head, input_pitch), last: pitched(tail, output_pitch=output_pitch)})

    def refusals(self) -> list[str]:
        """Reasons why no kernel computes them."""
        found, middle = [], self.depthwise
        if len(self.layers) == 1:
            found.append(f"{middle}: expected a layer before it, or a 1x1 layer after it, got neither")
        for layer in self.layers:
            if (layer.direction, layer.dtype, layer.layout) != ("fwd", "float32", "NCHW") or layer.quantized:
                found.append(f"{layer}: expected a forward layer of float32 in NCHW")
            if layer.residual and layer is not self.layers[-1]:
                found.append(f"{layer}: expected no residual but of the last layer")
        if not is_depthwise(middle):
            found.append(f"{middle}: expected one filter of at most {UNROLLED_TAPS} taps for each channel")
        if self.before is not None and not is_dense(self.before):
            found.append(f"{self.before}: expected one group, and a stride of at most {MOST_STRIDE} columns")
        if self.after is not None and not is_pointwise(self.after):
            found.append(f"{self.after}: expected 1x1 filters, unit stride, no padding, and one group")
        for first, second in zip(self.layers, self.layers[1:], strict=False):
            if first.output_shape != second.input_shapes[0]:
                found.append(f"{second}: expected an input {first.output_shape}, got {second.input_shapes[0]}")
        return found


def is_depthwise(layer: ConvLayer) -> bool:
    """Whether every channel has one filter, whose taps can be written out."""
    return layer.groups == layer.C == layer.K > 1 and layer.R * layer.S <= UNROLLED_TAPS


def is_dense(layer: ConvLayer) -> bool:
    """Whether all channels meet all filters, in columns that panels hold."""
    return layer.groups == 1 and layer.stride[1] <= MOST_STRIDE


def is_pointwise(layer: ConvLayer) -> bool:
    """Whether each output sees the pixel that it stands on, and no other."""
    return (layer.R, layer.S, layer.stride, layer.padding, layer.groups) == (1, 1, (1, 1), ((0, 0), (0, 0)), 1)


class FusedBlocking(NamedTuple):
    """How the work is cut: a task is `rows` rows of an image's output, `channels` hidden channels at a time."""

    rows: int
    channels: int

    def __str__(self) -> str:
        return f"rows={self.rows},channels={self.channels}"


class Caches(NamedTuple):
    """What of a device the cut depends on, besides its instruction set."""

    threads: int
    l1_bytes: int
    l2_bytes: int

    @classmethod
    def of(cls, device: CPU) -> Caches:
        """Those of a device."""
        return cls(device.threads, *device.machine.caches[:2])


class FusedTiling(NamedTuple):
    """A task's workspace: the image under a strip, rows of some hidden channels, one of zeros, and all that is made.

    The image is copied to a panel as `cut` says, and under a 1x1 layer, where that is None, read in place. Of hidden
    channels `seen` rows lie there, and then all that the depthwise layer makes for the one after it, `seen_pitch` and
    `made_pitch` elements from channel to channel. The depthwise layer has `TP` rows by `NV` vectors of sums in
    registers.
    """

    cut: PanelCut | None
    seen: int
    seen_pitch: int
    made_pitch: int
    TP: int
    NV: int
    panel_elements: int
    before_elements: int
    zeros_elements: int
    after_elements: int

    @classmethod
    def of(cls, instruction_set: str, layers: FusedLayers, blocking: FusedBlocking) -> FusedTiling:
        """The tiling of layers under a blocking."""
        before, middle, rows = layers.before, layers.depthwise, blocking.rows
        seen = min(middle.H, _rows_under(middle, rows))
        seen_pitch, made_pitch = pitch_of(seen * middle.W), pitch_of(rows * middle.Q)
        cut = None if before is None or is_pointwise(before) else _panel_cut(instruction_set, before, seen)
        panel = 0 if before is None or cut is None else cut.elements(before.C)
        hidden = 0 if before is None else blocking.channels * seen_pitch
        after = 0 if layers.after is None else middle.C * made_pitch
        block = _register_block(instruction_set, middle, rows)
        return cls(cut, seen, seen_pitch, made_pitch, *block, panel, hidden, zeros_elements(middle), after)

    @property
    def elements(self) -> int:
        """All of a thread's workspace."""
        return self.panel_elements + self.before_elements + self.zeros_elements + self.after_elements


def _panel_cut(instruction_set: str, layer: ConvLayer, rows: int) -> PanelCut:
    """The panel under so many rows of a layer's output."""
    (problem,) = correlations(layer)
    row = PanelRow(problem.columns, VECTOR_BYTES[instruction_set] // DTYPES[layer.dtype].bytes)
    held = _rows_under(layer, rows)
    return PanelCut(row, rows, False, held, held * row.pitch)


def _rows_under(layer: ConvLayer, rows: int) -> int:
    """Rows of the input that so many rows of the output see, be they in the image or not."""
    return (rows - 1) * layer.stride[0] + layer.dilation[0] * (layer.R - 1) + 1


def _register_block(instruction_set: str, layer: ConvLayer, rows: int) -> tuple[int, int]:
    """Rows that divide those of a strip, by vectors: sums that three quarters of the registers hold.

    Whole rows where these are at most half as many, which leaves no narrow rest; else in parts of about the same width.
    """
    lanes = VECTOR_BYTES[instruction_set] // DTYPES[layer.dtype].bytes
    room, wide = VECTOR_REGISTERS[instruction_set] * 3 // 4, math.ceil(layer.Q / lanes)
    NV = math.ceil(wide / math.ceil(wide / (room // 2)))
    return largest_divisor(rows, room // NV), NV


def line_tile(instruction_set: str, layer: ConvLayer, filters: int, caches: Caches) -> GemmBlocking:
    """The register tile of a layer before or after the depthwise one, of which so many filters are computed at a time.

    The pixels of a tile stay in half of the L1 cache for all of them. Of such tiles the one whose last block has the
    fewest filters missing, and of those the one that loads the least.
    """
    room = max(1, caches.l1_bytes // 2 // (layer.C * layer.R * layer.S * VECTOR_BYTES[instruction_set]))
    fitting = (tile for tile in register_tiles(instruction_set) if tile[0] <= room)
    vectors, TK = min(fitting, key=lambda tile: -filters % tile[1])
    return GemmBlocking(TK, vectors, 0, False, *caches)


def workspace_bytes(instruction_set: str, layers: FusedLayers, blocking: FusedBlocking, caches: Caches) -> int:
    """Of all threads."""
    one = FusedTiling.of(instruction_set, layers, blocking).elements
    return caches.threads * one * layers.depthwise.itemsize


def blockings(layers: FusedLayers, device: CPU) -> list[FusedBlocking]:
    """Ways to cut the work: the highest strips that leave every thread a task, and whose workspace fits the L2 cache.

    Where none does, the lowest that fit the last cache. Which of them stay in the L2 cache beside all that passes by,
    only running them tells.
    """
    middle, caches = layers.depthwise, Caches.of(device)
    heights: dict[int, list[FusedBlocking]] = {}
    fitting: list[int] = []
    for rows in dict.fromkeys(math.ceil(middle.P / (1 << n)) for n in range(middle.P.bit_length())):
        if middle.N * math.ceil(middle.P / rows) < device.threads:
            continue
        for most in MOST_CHANNELS if layers.before is not None else (1,):
            blocking = FusedBlocking(rows, largest_divisor(middle.C, most))
            needed = workspace_bytes(device.instruction_set, layers, blocking, caches)
            if needed <= device.machine.caches[-1] and blocking not in heights.get(rows, ()):
                heights.setdefault(rows, []).append(blocking)
                if needed <= device.threads * caches.l2_bytes and rows not in fitting:
                    fitting.append(rows)
    chosen = fitting[:MOST_HEIGHTS] or list(heights)[-MOST_HEIGHTS:]
    return [blocking for rows in chosen for blocking in heights[rows]]
