"""dgrad of strided layers whose outputs see no input twice, as one matrix product with an interleaving store.

With no more taps than the stride is long, every polyphase component of dx has a single tap: as transposed convolutions
that double an image have, and 1x1 filters that skip pixels. All components are then the rows of one product,
`dx[c, r, s, pq] = sum over k of w[k, c, r, s] dy[k, pq]`, whose filters lie as a gradient by 1x1 filters of C*R*S
channels reads them. What remains is to store the components of a row of dx interleaved, with zeros for those that no
tap reaches, and with the epilogue. The pixels of a tile are copied to a panel first: in networks that double images,
planes of powers of two lie so far apart that a pixel's channels all meet in one set of a cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import DTYPES, VECTOR_BYTES, Function, Module, Value, i64, ptr, widened
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.codegen.lines import line_places
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.common.correlation import correlations, pitched, pitches
from autoconv.cpu.common.epilogue import Epilogue
from autoconv.cpu.common.lanes import interleaved_in_turn, load_range, store_range
from autoconv.cpu.common.panel import in_lines, segments_of
from autoconv.cpu.common.polyphase.kernels import most_interleaved
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm.algorithm import Gemm, blocking_of
from autoconv.cpu.gemm.geometry import SUMS, ChannelRange, GemmBlocking, PixelTiles, blocks_of, chunks_of
from autoconv.cpu.gemm.kernels import emit_pack
from autoconv.cpu.gemm.tile import GemmTile, each_block, tiles_of
from autoconv.layer import ConvLayer


def pointwise(layer: ConvLayer) -> ConvLayer:
    """The gradient by 1x1 filters with a channel for every tap: of an input channel, all taps one after the other."""
    found = pitched(layer).replace(
        C=layer.C * layer.R * layer.S, H=layer.P, W=layer.Q, R=1, S=1, stride=1,
        bias=False, residual=False, activation=None,
    )  # fmt: skip
    return pitched(found, pitches(layer)[0])


class GemmPolyphase(GeneratedAlgorithm):
    """The polyphase components of dx as rows of one matrix product, interleaved as they are stored.

    Parameters are those of `gemm`, whose register tiles these are, with the sums of a row of components together.

    Sources: as for `gemm`; Shi et al., "Is the deconvolution layer the same as a convolutional layer?" (2016),
    arXiv:1609.07009, for components as channels, which are interleaved.
    """

    name = "gemm.polyphase"
    directions = ("dgrad",)
    layouts = ("NCHW",)
    groupings = ("dense", "grouped")
    dilated = False  # neighbouring taps would be of different components
    exact = True
    inner = Gemm()

    def unsupported(self, layer: ConvLayer) -> list[str]:
        """Besides what is declared: components of more than one tap, and outputs beyond those that see an input."""
        reasons = super().unsupported(layer)
        if reasons:
            return reasons
        if layer.stride == (1, 1):
            reasons.append("stride: expected more than one polyphase component, got that of stride 1x1")
        if layer.padding != ((0, 0), (0, 0)):
            reasons.append(f"padding: expected none, got {layer.padding}")
        sizes = zip("HW", (layer.H, layer.W), "RS", (layer.R, layer.S), layer.stride, (layer.P, layer.Q), strict=True)
        for name, size, filter_name, taps, step, count in sizes:
            if taps > step:
                reasons.append(f"{filter_name}: expected at most the stride's {step} taps, got {taps}")
            elif size > step * count:
                reasons.append(f"{name}: expected at most {step} for each output, {step * count}, got {size}")
        return reasons

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        found = ({name: params[name] for name in ("TK", "NV", "BC")} for params in self._inner(layer, device))
        return [params for params in found if int(params["TK"]) % layer.S == 0]

    def _inner(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return (params for params in self.inner.candidates(pointwise(layer), device) if not params["nt"])

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = self.inner.refusals(pointwise(layer), device, {**params, "nt": 0})
        if layer.stride[1] > (most := most_interleaved(device.instruction_set)):
            reasons.append(f"stride: expected at most {most} columns, got {layer.stride[1]}")
        if int(params["TK"]) % layer.S:
            reasons.append(f"TK={params['TK']}: expected whole rows of taps, a multiple of S={layer.S}")
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        size = panel_elements(device.instruction_set, layer, int(params["NV"])) * layer.accumulator.itemsize
        return device.threads * size

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return self.inner.packed_bytes(pointwise(layer), device, {**params, "nt": 0})

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """The product's, and a pass over dx in the L1 cache, which the product's own output is a part of."""
        machine, size = device.machine, layer.accumulator.itemsize
        vectors = math.prod(layer.x_shape) * size / VECTOR_BYTES[device.instruction_set]
        interleaved = vectors / (machine.transforms(VECTOR_BYTES[device.instruction_set]) * machine.threads)
        zeros = (math.prod(layer.x_shape) - math.prod(pointwise(layer).x_shape)) * layer.itemsize
        product = self.inner.estimate(pointwise(layer), device, {**params, "nt": 0})
        return product + interleaved + machine.writing(zeros, zeros / machine.threads)

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        blocking = blocking_of(device, {**params, "nt": 0})
        return compiler.build(emit, device.instruction_set, layer, blocking)


def panel_elements(instruction_set: str, layer: ConvLayer, NV: int) -> int:
    """Elements of a thread's panel: the pixels of one tile, of all channels of dy, in whole vectors."""
    lanes = VECTOR_BYTES[instruction_set] // layer.accumulator.itemsize
    return in_lines(layer.K // layer.groups * NV * lanes)


def emit(instruction_set: str, layer: ConvLayer, blocking: GemmBlocking) -> Module:
    """`run` and `pack`."""
    m = Module(instruction_set)
    (problem,) = correlations(pointwise(layer))
    emit_pack(m, layer, problem, blocking.TK)
    run = m.function("run", *RUN)
    launch(run, run.args[0], *_ProductWriter(m, layer, blocking).task())
    return m


class _ProductWriter:
    """Writes the task: some tiles of the product by channels whose filters stay in cache, all sums kept in memory."""

    def __init__(self, m: Module, layer: ConvLayer, blocking: GemmBlocking) -> None:
        self.m, self.layer, self.blocking = m, layer, blocking
        (self.problem,) = correlations(pointwise(layer))
        self.element = DTYPES[layer.dtype]
        self.wide, self.lanes = widened(self.element), m.lanes(self.element)
        self.tiles = [PixelTiles(*s, 0, 1) for s in segments_of(layer.P * layer.Q, self.lanes, blocking.NV, 0)]
        self.ranges = [one._replace(ends=False) for one in ChannelRange.all(self.problem.C, blocking.BC)]
        self.pitch = blocking.NV * self.lanes
        self.sums_size = blocking.TK * self.pitch
        self.functions = {}
        for n, channels in enumerate(dict.fromkeys(self.ranges)):
            tile = GemmTile(blocking.TK, channels, self.pitch)
            widths = {self._rounded(tile.pixels) for tile in self.tiles}
            whole = [PixelTiles(0, 1, width, 0, 1) for width in sorted(widths)]
            self.functions[channels] = tiles_of(m, f"tile_{n}", layer, self.wide, self.problem.K, whole, tile)
        self.stores = {
            (tile.pixels, rows): _emit_store(m, layer, tile.pixels, rows)
            for tile in self.tiles
            for rows, _ in blocks_of(self.problem.K, blocking.TK)
        }

    def _rounded(self, pixels: int) -> int:
        """Pixels in whole vectors."""
        return -(-pixels // self.lanes) * self.lanes

    def task(self) -> tuple[Function, int]:
        """The task, and how many there are."""
        layer, problem, blocking = self.layer, self.problem, self.blocking
        k = self.k = self.m.function("task", *TASK, internal=True)
        blocks = -(-problem.K // blocking.TK)
        most = SUMS // (self.sums_size * self.wide.bytes) if len(self.ranges) > 1 else blocks
        self.kept, chunks, _ = chunks_of(problem, blocking, self.wide.bytes, most, self.tiles)
        tiles = sum(tile.times for tile in self.tiles)
        images = problem.N * problem.groups
        together = max(1, min(8, tiles * images * chunks // (8 * blocking.threads)))
        spans = -(-tiles // together)
        context, index, thread = k.args
        dy, w, dx, bias, residual, workspace = operands(k, context, self.element, self.wide, *[self.element] * 3)
        panel_bytes = panel_elements(self.m.instruction_set, layer, blocking.NV) * self.wide.bytes
        self.panel = k.bytes_at(workspace, thread * panel_bytes, self.wide)
        span, rest = index % spans, index // spans
        image, chunk = rest % images, rest // images
        n, group = image // problem.groups, image % problem.groups
        self.dy = dy + n * problem.input.image + group * problem.input.group
        place = n * pitches(layer)[1] + group * (layer.C // layer.groups * layer.H * layer.W)
        self.dx, self.residual = dx + place, residual + place
        self.bias = bias + group * (layer.C // layer.groups)
        self.w = w + group * (problem.K * problem.C)
        self.first = chunk * self.kept
        self.last = k.min(self.first + self.kept, blocks)
        self.sums = k.scratch(self.wide, self.sums_size * (self.kept if len(self.ranges) > 1 else 1))
        before = 0
        with k.loop(span * tiles // spans, (span + 1) * tiles // spans) as t:
            for tile in self.tiles:
                inside = k.select(t >= before, t, k.i64(tiles)) < before + tile.times
                with k.if_(inside):
                    self._tile((t - before) * tile.pixels + tile.start, tile.pixels)
                before += tile.times
        return k, spans * images * chunks

    def _tile(self, start: Value, pixels: int) -> None:
        """The sums of some pixels for all blocks of a task, a range of channels after the other."""
        k, done = self.k, 0
        with k.loop(0, self.problem.C) as c:
            for v in range(0, pixels, self.lanes):
                there = self.dy + (start + c * self.problem.input.channel + v)
                some = k.load(there, self.lanes, mask=k.mask(min(self.lanes, pixels - v), self.lanes))
                k.store(some, self.panel + c * self.pitch + v)
        for channels, same in itertools.groupby(self.ranges):
            number = len(list(same)) * channels.C
            final = done + number == self.problem.C
            with k.loop(done, done + number, channels.C) as channel:
                self._add_range(start, pixels, channels, channel, final)
            done += number

    def _add_range(self, start: Value, pixels: int, channels: ChannelRange, channel: Value, final: bool) -> None:
        """One range for all blocks; the next tile's pixels are fetched meanwhile. After the last, dx is stored."""
        k, problem, TK = self.k, self.problem, self.blocking.TK
        here = self.panel + channel * self.pitch
        following = self.dy + (start + pixels) + channel * problem.input.channel
        last = channel.eq(problem.C - channels.C) if final else None

        def add_block(block: Value, rows: int, together: int) -> None:
            number = block - self.first
            with k.loop(number * channels.C // self.kept, (number + together) * channels.C // self.kept) as c:
                for place in line_places(0, pixels, 1, self.element.bytes):
                    k.prefetch(following + (c * problem.input.channel + place))
            first = block * TK
            filters = self.w + (first * problem.C + channel * rows)
            own = self.sums + number * self.sums_size if len(self.ranges) > 1 else self.sums
            unused = self.dx, self.dx, self.dx
            k.call(self.functions[channels][self._rounded(pixels), rows, together], here, filters, here, *unused, own)
            if last is not None:
                with k.if_(last):
                    stored = self.dx, self.residual, self.bias
                    k.call(self.stores[pixels, rows], own, *stored, first // self.layer.S, start)

        each_block(k, problem.K, TK, self.first, self.last, 1, add_block)


def _emit_store(m: Module, layer: ConvLayer, pixels: int, rows: int) -> Function:
    """`function(sums, dx, residual, bias, row, start)`: store a tile of sums with its epilogue as rows of dx.

    Rows of components are numbered through the channels, with R of them in each; `row` is the tile's first.
    """
    element = DTYPES[layer.dtype]
    wide, lanes = widened(element), m.lanes(element)
    k = m.function(f"store_{pixels}x{rows}", ptr(wide), *[ptr(element)] * 3, i64, i64, internal=True)
    sums, dx, residual, bias, row, start = k.args
    whole = (layer.P * layer.stride[0], layer.Q * layer.stride[1]) == (layer.H, layer.W)
    for n in range(rows // layer.S):
        c, r = (row + n) // layer.R, (row + n) % layer.R
        place = c * (layer.H * layer.W) + r * layer.W
        own = sums + n * layer.S * -(-pixels // lanes) * lanes
        writer = _RowWriter(k, layer, own, dx + place, residual + place, bias + c, start, pixels, r)
        (writer.store_vectors if whole else writer.store_singly)()
    return k


@dataclass(frozen=True)
class _RowWriter:
    """Writes the store of a tile's row of components: row `r` of a channel, from pixel `start` of dy on.

    `at` and `residual` point at the channel's row r, `bias` at its bias.
    """

    k: Function
    layer: ConvLayer
    sums: Value
    at: Value
    residual: Value
    bias: Value
    start: Value
    pixels: int
    r: Value

    def store_vectors(self) -> None:
        """Interleaved in registers.

        What is stored at once holds so few pixels of dy that it lies in one row, wherever the tile starts.
        """
        k, layer, sums, pixels = self.k, self.layer, self.sums, self.pixels
        (down, across), S = layer.stride, layer.S
        assert sums.type.to is not None
        lanes, epilogue = k.module.lanes(DTYPES[layer.dtype]), Epilogue.of(layer)
        together = math.gcd(layer.Q, lanes)
        piece = math.gcd(together * across, lanes)
        starts = [self.start + pixel for pixel in range(0, pixels, together)]
        places = [i * across + i // layer.Q * ((down - 1) * layer.W) for i in starts]
        zero, vectors = k.zero(sums.type.to, lanes), -(-pixels // lanes)
        b = epilogue.of_channels(lambda place: k.broadcast(place, lanes), self.bias)

        def put(number: int, one: Value, below: Value | int) -> None:
            """Vector `number` of the interleaved row, or of one so many elements further."""
            v = one if epilogue.residual else epilogue.apply(k, one, b, None)
            for low in range(0, lanes, piece):
                pixel, within = divmod(number * lanes + low, across)
                if pixel < pixels:
                    first, rest = divmod(pixel, together)
                    there = places[first] + (rest * across + within - low) + below
                    if epilogue.residual:
                        r = load_range(k, self.residual + there, lanes, low, low + piece)
                        v = epilogue.apply(k, one, b, r)
                    store_range(k, v, self.at + there, low, low + piece)

        for v in range(vectors):
            components = [k.load(sums + (s * vectors + v) * lanes, lanes) for s in range(S)]
            for part, one in enumerate(interleaved_in_turn(k, components + [zero] * (across - S))):
                put(v * across + part, one, 0)
        if down > layer.R:
            with k.if_(self.r.eq(layer.R - 1)), k.loop(1, down - layer.R + 1) as below:
                for number in range(vectors * across):
                    put(number, zero, below * layer.W)

    def store_singly(self) -> None:
        """With last outputs, which no tap reaches, that may lie outside of dx."""
        k, layer, pixels = self.k, self.layer, self.pixels
        (down, across), S = layer.stride, layer.S
        assert self.sums.type.to is not None
        lanes, zero, epilogue = k.module.lanes(DTYPES[layer.dtype]), k.zero(self.sums.type.to), Epilogue.of(layer)
        b = epilogue.of_channels(k.load, self.bias)

        def put(one: Value, there: Value) -> None:
            r = k.load(self.residual + there) if epilogue.residual else None
            k.store(epilogue.apply(k, one, b, r), self.at + there)

        with k.loop(0, pixels) as i:
            p, q = (self.start + i) // layer.Q, (self.start + i) % layer.Q
            there = p * (down * layer.W) + q * across
            last = k.min(layer.W - q * across, across)
            for s in range(S):
                put(k.load(self.sums + i + s * (-(-pixels // lanes) * lanes)), there + s)
            with k.loop(S, last) as column:
                put(zero, there + column)
            if down > layer.R:
                with k.if_(self.r.eq(layer.R - 1)):
                    rows = k.min(layer.H - p * down - layer.R + 1, down - layer.R + 1)
                    with k.loop(1, rows) as below, k.loop(0, last) as column:
                        put(zero, there + below * layer.W + column)
