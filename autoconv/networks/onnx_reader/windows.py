"""ONNX's convolutions and pooling in terms of ours: those of one dimension are of height 1."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

from autoconv.layer import Sides
from autoconv.networks.onnx_reader.call import Call, Lowering
from autoconv.networks.operators.convolution import Conv, ConvTranspose
from autoconv.networks.operators.pooling import Pool, overhang_of


class Window:
    """The attributes of a window in two dimensions, and the images it moves over."""

    def __init__(self, call: Call, window: tuple[int, ...]) -> None:
        self.call = call
        shape = call.type().shape
        rank = len(shape) - 2
        if rank not in (1, 2):
            call.fail(f"expected images of one or two dimensions (N, C, [H,] W), got {shape}")
        given = call.attribute("kernel_shape")
        if given is not None and len(window) == rank and tuple(given) != tuple(window):
            call.fail(f"kernel_shape={tuple(given)}: expected {window}, from the filters")
        self.narrow = rank == 1
        self.size = self._pair("kernel_shape", tuple(window))
        self.stride = self._pair("strides", call.attribute("strides") or (1,) * rank)
        self.dilation = self._pair("dilations", call.attribute("dilations") or (1,) * rank)
        self.extents = shape[2:] if rank == 2 else (1, *shape[2:])
        self.spans = tuple((taps - 1) * d + 1 for taps, d in zip(self.size, self.dilation, strict=True))
        self.x = self.wide(call.value(0))

    def _pair(self, name: str, value: tuple[int, ...], fill: int = 1) -> Any:
        rank = 1 if self.narrow else 2
        if len(value) != rank or not all(isinstance(n, int) and n >= fill for n in value):
            self.call.fail(f"{name}={value}: expected {rank} integers of at least {fill}")
        return (fill, *value) if self.narrow else tuple(value)

    def pair(self, name: str, fill: int = 0) -> Any:
        """An attribute of one value for each dimension; so many where it is left out."""
        return self._pair(name, self.call.attribute(name) or (fill,) * (1 if self.narrow else 2), fill)

    def wide(self, name: str) -> str:
        """An array of one dimension as one of height 1."""
        shape = self.call.graph.types[name].shape
        return self.call.reshape(name, (*shape[:2], 1, *shape[2:])) if self.narrow else name

    def back(self, name: str) -> str:
        """The result without the height that it was given."""
        shape = self.call.graph.types[name].shape
        return self.call.reshape(name, (*shape[:2], *shape[3:])) if self.narrow else name

    def explicit(self) -> Sides:
        """The attribute `pads`."""
        rank = 1 if self.narrow else 2
        pads = self.call.attribute("pads") or (0,) * (2 * rank)
        if len(pads) != 2 * rank or min(pads) < 0:
            self.call.fail(f"pads={pads}: expected {2 * rank} integers of at least 0")
        sides = tuple((int(pads[n]), int(pads[n + rank])) for n in range(rank))
        return ((0, 0), sides[0]) if self.narrow else (sides[0], sides[1])

    def split(self, totals: list[int]) -> Sides:
        """Padding of so much in all, on both sides alike; what is odd goes before, but for `auto_pad`'s SAME_UPPER."""
        lower = self.call.attribute("auto_pad") != "SAME_UPPER"
        (a, b), (c, d) = ((t - t // 2, t // 2) if lower else (t // 2, t - t // 2) for t in totals)
        return (a, b), (c, d)

    def padding(self) -> Sides:
        """What pads the input, in whichever way it is told."""
        auto = self.call.attribute("auto_pad", "NOTSET")
        if auto == "NOTSET":
            return self.explicit()
        if auto == "VALID":
            return (0, 0), (0, 0)
        if auto not in ("SAME_UPPER", "SAME_LOWER"):
            self.call.fail(f"auto_pad={auto!r}: expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
        return self.split(
            [
                max((math.ceil(extent / step) - 1) * step + span - extent, 0)
                for extent, step, span in zip(self.extents, self.stride, self.spans, strict=True)
            ]
        )


def _with_bias(call: Call, y: str) -> str:
    return call.with_bias(y, call.value(2)) if call.has(2) else y


def _conv(call: Call) -> str:
    window = Window(call, call.type(1).shape[2:])
    conv = Conv(
        stride=window.stride, padding=window.padding(), dilation=window.dilation, groups=call.attribute("group", 1)
    )
    return window.back(_with_bias(call, call.add(conv, window.x, window.wide(call.value(1)))))


def _conv_transpose(call: Call) -> str:
    window = Window(call, call.type(1).shape[2:])
    extra = window.pair("output_padding")
    least = [
        (extent - 1) * step + span + over
        for extent, step, span, over in zip(window.extents, window.stride, window.spans, extra, strict=True)
    ]
    auto = call.attribute("auto_pad", "NOTSET")
    shape = call.attribute("output_shape")
    if shape is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        shape = [extent * step for extent, step in zip(window.extents, window.stride, strict=True)]
    elif shape is not None:
        shape = [1, *shape] if window.narrow else shape
    if shape is None:
        padding = window.padding()
    else:
        totals = [all_ - wanted for all_, wanted in zip(least, shape, strict=True)]
        # Where the output is wanted larger than the sums reach, the rest is rows without any.
        extra = tuple(over + max(-total, 0) for over, total in zip(extra, totals, strict=True))
        padding = window.split([max(total, 0) for total in totals])
    conv = ConvTranspose(
        stride=window.stride,
        padding=padding,
        dilation=window.dilation,
        groups=call.attribute("group", 1),
        extra_size=extra,
    )
    return window.back(_with_bias(call, call.conv_transpose(conv, window.x, window.wide(call.value(1)))))


def _pool(reduction: Literal["max", "mean"], call: Call) -> str:
    if len(call.outputs) > 1 and call.outputs[1]:  # the package onnx, which may have to run it, computes others
        call.fail("expected one output: the indices of the largest elements are not computed")
    window = Window(call, tuple(call.required("kernel_shape")))
    padding = window.padding()
    overhang = [0, 0]
    if call.attribute("ceil_mode", 0) and call.attribute("auto_pad", "NOTSET") == "NOTSET":
        for n, (extent, span, step, sides) in enumerate(
            zip(window.extents, window.spans, window.stride, padding, strict=True)
        ):
            overhang[n] = overhang_of(extent, span, step, sides)
    pool = Pool(
        reduction=reduction, window=window.size, stride=window.stride, padding=padding, dilation=window.dilation,
        overhang=(overhang[0], overhang[1]), include_padding=bool(call.attribute("count_include_pad", 0)),
    )  # fmt: skip
    return window.back(call.add(pool, window.x))


def _of_images(lowering: Lowering) -> Lowering:
    """The same for images of one and two dimensions; those of more are left to who runs foreign operators."""
    return lambda call: lowering(call) if len(call.type().shape) <= 4 else None


LOWERINGS: dict[str, Lowering] = {
    "AveragePool": _of_images(functools.partial(_pool, "mean")),
    "Conv": _of_images(_conv),
    "ConvTranspose": _of_images(_conv_transpose),
    "MaxPool": _of_images(functools.partial(_pool, "max")),
}
