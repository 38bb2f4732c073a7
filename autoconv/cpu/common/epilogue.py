"""The epilogue of a layer, and the store of a tile of sums with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoconv.common.epilogue.activations import expression, has_slopes
from autoconv.cpu.codegen.ir import Function, Module, Type, Value, i64, ptr, widened
from autoconv.cpu.common.correlation import Correlation
from autoconv.cpu.common.functions import value_of
from autoconv.cpu.common.lanes import load_range, store_range
from autoconv.layer import ConvLayer

OfChannels = tuple[Value | None, Value | None]  # bias and slope


@dataclass(frozen=True)
class Epilogue:
    """What is fused into the store of sums `v`: `act(v + bias + residual)`.

    A channel's slope lies `slopes` elements behind its bias, or where that would be; None where there are no slopes.
    """

    bias: bool
    residual: bool
    activation: str | None
    slopes: int | None

    @classmethod
    def of(cls, layer: ConvLayer) -> Epilogue:
        """A layer's."""
        slopes = layer.output_channels * layer.bias if has_slopes(layer.activation) else None
        return cls(layer.bias, layer.residual, layer.activation, slopes)

    def of_channels(self, load: Callable[[Value], Value], bias: Value) -> OfChannels:
        """What `apply` takes of the channels to which `bias` points: each as `load` reads it."""
        return load(bias) if self.bias else None, None if self.slopes is None else load(bias + self.slopes)

    def apply(self, k: Function, v: Value, of_channels: OfChannels, residual: Value | None) -> Value:
        """What is stored in place of sums; the residual is given where there is one."""
        bias, slope = of_channels
        if bias is not None:
            v = v + bias
        if residual is not None:
            v = v + residual
        if self.activation is None:
            return v
        return value_of(k, expression(self.activation), [v] if slope is None else [v, slope], v)


def emit_store(
    m: Module,
    c: Correlation,
    epilogue: Epilogue,
    TK: int,
    element: Type,
    shape: tuple[int, int],
    strides: tuple[int, int, int],
    room: int | None = None,
) -> Function:
    """`function(sums, out, residual, bias, channels left)`: store a tile of sums with its epilogue.

    Sums lie `[TK/lanes][pixels][lanes]` in memory, pixels row by row of `shape`, with `room` for so many where that is
    more; `strides` are the elements between channels, rows and columns of the output; `out` and `residual` point at the
    tile's first element, `bias` at its first channel. One text serves all microkernels of a shape.
    """
    sums, lanes = widened(element), m.lanes(element)
    data = ptr(element)
    k = m.function(f"store_{len(m.functions)}", ptr(sums), data, data, data, i64, internal=True)
    tile, out, residual, bias, left = k.args
    pixels = shape[0] * shape[1]
    with k.loop(0, TK // lanes) as v:
        here = tile + v * ((room or pixels) * lanes)
        values = [k.load(here + n * lanes, lanes) for n in range(pixels)]
        place = v * (lanes * strides[0])
        some = lanes if c.K % TK == 0 else left - v * lanes
        _StoreWriter(k, epilogue, shape, strides, out + place, residual + place, bias + v * lanes).write(values, some)
    return k


@dataclass(frozen=True)
class _StoreWriter:
    """Writes the store of a vector of channels of a tile, whose pixels lie row by row of `shape`.

    `strides` are the elements between channels, rows and columns of the output; `out` and `residual` point at the
    first channel of the first pixel, `bias` at the first channel.
    """

    k: Function
    epilogue: Epilogue
    shape: tuple[int, int]
    strides: tuple[int, int, int]
    out: Value
    residual: Value
    bias: Value

    def write(self, values: Sequence[Value], left: int | Value) -> None:
        """Store a vector for every pixel, of whose channels only `left` exist (a number where that is known)."""
        if self.strides[0] == 1:
            self._channels_last(values, left)
            return
        k, lanes, pixels = self.k, values[0].type.lanes, len(values)
        for first in range(0, pixels, lanes):
            block = [values[n] if n < pixels else values[0] for n in range(first, first + lanes)]
            for channel, column in enumerate(k.transpose(block)):
                if isinstance(left, Value):
                    with k.if_(left > channel):
                        self._plane(column, first, channel)
                elif channel < left:
                    self._plane(column, first, channel)

    def _channels_last(self, values: Sequence[Value], left: int | Value) -> None:
        k, lanes, epilogue = self.k, values[0].type.lanes, self.epilogue
        mask = k.mask(left, lanes)
        b = epilogue.of_channels(lambda place: k.load(place, lanes, mask=mask), self.bias)
        for n, v in enumerate(values):
            place = n // self.shape[1] * self.strides[1] + n % self.shape[1] * self.strides[2]
            r = k.load(self.residual + place, lanes, mask=mask) if epilogue.residual else None
            k.store(epilogue.apply(k, v, b, r), self.out + place, mask=mask)

    def _plane(self, v: Value, first: int, channel: int) -> None:
        """Pixels first .. of one channel, lanes as pixels."""
        k, epilogue, (height, width), lanes = self.k, self.epilogue, self.shape, v.type.lanes
        last = min(first + lanes, height * width)
        b = epilogue.of_channels(lambda place: k.broadcast(place, lanes), self.bias + channel)
        between, down, across = self.strides
        whole = down == width * across  # rows follow one another: the tile is one run of pixels
        length = height * width if whole else width
        low = first
        while low < last:
            row, column = divmod(low, length)
            high = min(last, low - column + length)
            if across == 1:
                place = channel * between + row * down + column - (low - first)
                r = (
                    load_range(k, self.residual + place, lanes, low - first, high - first)
                    if epilogue.residual
                    else None
                )
                store_range(k, epilogue.apply(k, v, b, r), self.out + place, low - first, high - first)
            else:  # only a strided gradient's
                for n in range(low, high):
                    place = channel * between + n // width * down + n % width * across
                    r = k.load(self.residual + place) if epilogue.residual else None
                    one = epilogue.of_channels(k.load, self.bias + channel)
                    k.store(epilogue.apply(k, k.extract(v, n - first), one, r), self.out + place)
            low = high
