"""ONNX's convolutions and pooling in terms of ours: those of one dimension are of height 1.

Those of three are of the frames of each volume, and then of frames.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from autoconv.layer import Pair
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.operators.convolution import Conv, ConvTranspose
from autoconv.networks.operators.pooling import overhang_of, pool_of


class Window:
    """The attributes of a window in one to three dimensions, and the arrays it moves over."""

    def __init__(self, call: Call, size: tuple[int, ...]) -> None:
        self.call = call
        self.shape = call.type().shape
        self.rank = len(self.shape) - 2
        if self.rank not in (1, 2, 3):
            call.fail(f"expected arrays of one to three dimensions (N, C, [[D,] H,] W), got {self.shape}")
        given = call.attribute("kernel_shape")
        if given is not None and len(size) == self.rank and tuple(given) != tuple(size):
            call.fail(f"kernel_shape={tuple(given)}: expected {size}, from the filters")
        self.size = self._checked("kernel_shape", tuple(size), 1)
        self.stride = self.numbers("strides", 1)
        self.dilation = self.numbers("dilations", 1)
        self.spans = tuple((taps - 1) * d + 1 for taps, d in zip(self.size, self.dilation, strict=True))

    def _checked(self, name: str, value: tuple[int, ...], least: int) -> tuple[int, ...]:
        if len(value) != self.rank or not all(isinstance(n, int) and n >= least for n in value):
            self.call.fail(f"{name}={value}: expected {self.rank} integers of at least {least}")
        return tuple(value)

    def numbers(self, name: str, least: int = 0) -> tuple[int, ...]:
        """An attribute of one value for each dimension; the least for all where it is left out."""
        return self._checked(name, self.call.attribute(name) or (least,) * self.rank, least)

    def pair(self, values: Sequence[Any], fill: Any = 1) -> Any:
        """Values for height and width, of which a dimension that is not there has `fill`."""
        return (*(fill,) * (2 - self.rank), *values)

    def wide(self, name: str) -> str:
        """An array of one dimension as one of height 1."""
        shape = self.call.graph.types[name].shape
        return self.call.reshape(name, (*shape[:2], 1, *shape[2:])) if self.rank == 1 else name

    def back(self, name: str) -> str:
        """The result without the height that it was given."""
        shape = self.call.graph.types[name].shape
        return self.call.reshape(name, (*shape[:2], *shape[3:])) if self.rank == 1 else name

    def explicit(self) -> list[Pair]:
        """The attribute `pads`."""
        rank = self.rank
        pads = self.call.attribute("pads") or (0,) * (2 * rank)
        if len(pads) != 2 * rank or min(pads) < 0:
            self.call.fail(f"pads={pads}: expected {2 * rank} integers of at least 0")
        return [(int(pads[n]), int(pads[n + rank])) for n in range(rank)]

    def split(self, totals: Sequence[int]) -> list[Pair]:
        """Padding of so much in all, on both sides alike; what is odd goes before, but for `auto_pad`'s SAME_UPPER."""
        lower = self.call.attribute("auto_pad") != "SAME_UPPER"
        return [(t - t // 2, t // 2) if lower else (t // 2, t - t // 2) for t in totals]

    def padding(self) -> list[Pair]:
        """What pads the input, in whichever way it is told."""
        auto = self.call.attribute("auto_pad", "NOTSET")
        if auto == "NOTSET":
            return self.explicit()
        if auto == "VALID":
            return [(0, 0)] * self.rank
        if auto not in ("SAME_UPPER", "SAME_LOWER"):
            self.call.fail(f"auto_pad={auto!r}: expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
        return self.split(
            [
                max((math.ceil(extent / step) - 1) * step + span - extent, 0)
                for extent, step, span in zip(self.shape[2:], self.stride, self.spans, strict=True)
            ]
        )


def _with_bias(call: Call, y: str) -> str:
    return call.with_bias(y, call.value(2)) if call.has(2) else y


def _conv(call: Call) -> str:
    window, groups = Window(call, call.type(1).shape[2:]), call.attribute("group", 1)
    if window.rank == 3:
        bias = call.value(2) if call.has(2) else None
        geometry = window.stride, window.padding(), window.dilation, groups
        return call.conv_volumes(call.value(0), call.value(1), bias, *geometry)
    conv = Conv(
        stride=window.pair(window.stride), padding=window.pair(window.padding(), (0, 0)),
        dilation=window.pair(window.dilation), groups=groups,
    )  # fmt: skip
    return window.back(_with_bias(call, call.add(conv, window.wide(call.value(0)), window.wide(call.value(1)))))


def _conv_transpose(call: Call) -> str | None:
    window = Window(call, call.type(1).shape[2:])
    if window.rank == 3:
        return None
    extra = window.numbers("output_padding")
    least = [
        (extent - 1) * step + span + over
        for extent, step, span, over in zip(window.shape[2:], window.stride, window.spans, extra, strict=True)
    ]
    auto = call.attribute("auto_pad", "NOTSET")
    shape = call.attribute("output_shape")
    if shape is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        shape = [extent * step for extent, step in zip(window.shape[2:], window.stride, strict=True)]
    if shape is None:
        padding = window.padding()
    else:
        totals = [all_ - wanted for all_, wanted in zip(least, shape, strict=True)]
        # Where the output is wanted larger than the sums reach, the rest is rows without any.
        extra = tuple(over + max(-total, 0) for over, total in zip(extra, totals, strict=True))
        padding = window.split([max(total, 0) for total in totals])
    conv = ConvTranspose(
        stride=window.pair(window.stride),
        padding=window.pair(padding, (0, 0)),
        dilation=window.pair(window.dilation),
        groups=call.attribute("group", 1),
        extra_size=window.pair(extra, 0),
    )
    x, w = (window.wide(call.value(n)) for n in range(2))
    return window.back(_with_bias(call, call.conv_transpose(conv, x, w)))


def _pool(reduction: Literal["max", "mean"], call: Call) -> str:
    if len(call.outputs) > 1 and call.outputs[1]:  # the package onnx, which may have to run it, computes others
        call.fail("expected one output: the indices of the largest elements are not computed")
    window = Window(call, tuple(call.required("kernel_shape")))
    padding = window.padding()
    overhang = [0] * window.rank
    if call.attribute("ceil_mode", 0) and call.attribute("auto_pad", "NOTSET") == "NOTSET":
        places = zip(window.shape[2:], window.spans, window.stride, padding, strict=True)
        overhang = [overhang_of(extent, span, step, sides) for extent, span, step, sides in places]
    make = functools.partial(
        pool_of, reduction, window.size, window.stride, padding, window.dilation, overhang,
        bool(call.attribute("count_include_pad", 0)),
    )  # fmt: skip
    if window.rank == 3:
        return call.pool_volumes(call.value(0), make(0, None), make(1, 2))
    pool = make(0, 1) if window.rank == 2 else make(None, 0)
    return window.back(call.add(pool, window.wide(call.value(0))))


LOWERINGS: dict[str, Lowering] = {
    "AveragePool": functools.partial(_pool, "mean"),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": functools.partial(_pool, "max"),
}
