"""ATen's convolutions, pooling and reductions in terms of ours: those of one dimension are of height 1.

Those of three are of the frames of each volume, and then of frames.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from autoconv.networks.operators.convolution import Conv, ConvTranspose
from autoconv.networks.operators.pooling import Pool, Reduce, overhang_of, pool_of
from autoconv.networks.operators.shapes import Resize
from autoconv.networks.torch_reader.call import Call, Lowering


def _images(call: Call, argument: str, rank: int) -> tuple[str, Callable[[str], str]]:
    """Images, of which there may be a single one without an axis, as (N, C, H, W), and the way back."""
    name = call.value(argument)
    shape = call.shape_of(name)
    if rank not in (1, 2) or len(shape) not in (rank + 1, rank + 2):
        call.fail(f"expected images of one or two dimensions (N, C, [H,] W), got {shape}")
    batch = shape[: len(shape) - rank - 1]

    def back(y: str) -> str:
        found = call.shape_of(y)
        return call.reshape(y, (*found[: len(batch)], found[1], *found[4 - rank :]))

    return call.reshape(name, (*(batch or (1,)), shape[-rank - 1], *(1,) * (2 - rank), *shape[-rank:])), back


def _volumes(call: Call, argument: str) -> tuple[str, Callable[[str], str]]:
    """Volumes, of which there may be a single one without an axis, as (N, C, D, H, W), and the way back."""
    name = call.value(argument)
    shape = call.shape_of(name)
    if len(shape) not in (4, 5):
        call.fail(f"expected volumes ([N,] C, D, H, W), got {shape}")
    batch = shape[:-4]
    return call.reshape(name, (*(batch or (1,)), *shape[-4:])), lambda y: call.reshape(
        y, (*batch, *call.shape_of(y)[1:])
    )


def _filters(call: Call, rank: int) -> str:
    name = call.value("weight")
    shape = call.shape_of(name)
    return call.reshape(name, (*shape[:2], *(1,) * (2 - rank), *shape[2:]))


def _wide(call: Call, argument: str, rank: int, fill: int, default: tuple[int, ...] | None = None) -> Any:
    """Integers for height and width, of which a dimension that is not there has `fill`."""
    return (*(fill,) * (2 - rank), *call.pair(argument, rank, default))


def _padding(call: Call, spans: Sequence[int]) -> list[tuple[int, int]]:
    """What a convolution is padded with, on both sides of each dimension."""
    given = call["padding"]
    if given == "valid":
        return [(0, 0)] * len(spans)
    if given == "same":  # the odd pixel goes to the end
        return [((span - 1) // 2, span - 1 - (span - 1) // 2) for span in spans]
    return [(sides, sides) for sides in call.pair("padding", len(spans))]


def _spans(call: Call, dilation: Sequence[int]) -> list[int]:
    """How far filters reach, in each dimension."""
    return [(taps - 1) * d + 1 for taps, d in zip(call.shape("weight")[2:], dilation, strict=True)]


def _convolution(rank: int | None, call: Call) -> str:
    rank = len(call.shape("weight")) - 2 if rank is None else rank
    if rank == 3:
        return _volume_convolution(call)
    x, back = _images(call, "input", rank)
    w = _filters(call, rank)
    sides = _padding(call, _spans(call, call.pair("dilation", rank)))
    geometry: dict[str, Any] = {
        "stride": _wide(call, "stride", rank, 1),
        "padding": (*((0, 0),) * (2 - rank), *sides),
        "dilation": _wide(call, "dilation", rank, 1),
        "groups": call["groups"],
    }
    if call.has("output_padding") and (call["transposed"] if call.has("transposed") else True):
        y = call.conv_transpose(ConvTranspose(**geometry, extra_size=_wide(call, "output_padding", rank, 0)), x, w)
    else:
        y = call.add(Conv(**geometry), x, w)
    return back(call.with_bias(y, call.value("bias")) if call.has("bias") else y)


def _volume_convolution(call: Call) -> str:
    if call.has("transposed") and call["transposed"]:
        call.fail("expected a convolution of three dimensions that is not transposed")
    x, back = _volumes(call, "input")
    bias = call.value("bias") if call.has("bias") else None
    dilation = call.pair("dilation", 3)
    padding = _padding(call, _spans(call, dilation))
    stride, groups = call.pair("stride", 3), call["groups"]
    return back(call.conv_volumes(x, call.value("weight"), bias, stride, padding, dilation, groups))


def _own_convolution(call: Call) -> str:
    """`autoconv.torch.conv2d` and `conv_transpose2d`, whose padding is that of all four sides."""
    top, bottom, left, right = call["padding"]
    geometry: dict[str, Any] = {
        "stride": call.pair("stride"),
        "padding": ((top, bottom), (left, right)),
        "dilation": call.pair("dilation"),
        "groups": call["groups"],
    }
    x, w = call.value("x"), call.value("w")
    if call.has("output_padding"):
        y = call.conv_transpose(ConvTranspose(**geometry, extra_size=call.pair("output_padding")), x, w)
    else:
        y = call.add(Conv(**geometry), x, w)
    return call.with_bias(y, call.value("bias")) if call.has("bias") else y


def _pool(reduction: Literal["max", "mean"], rank: int, call: Call) -> str:
    if call.has("divisor_override"):
        call.fail(f"divisor_override={call['divisor_override']}: expected None")
    x, back = _volumes(call, "self") if rank == 3 else _images(call, "self", rank)
    window = call.pair("kernel_size", rank)
    stride = call.pair("stride", rank, window)
    dilation = call.pair("dilation", rank) if call.has("dilation") else (1,) * rank
    padding = [(sides, sides) for sides in call.pair("padding", rank)]
    overhang = [0] * rank
    if call["ceil_mode"]:
        spans = ((taps - 1) * d + 1 for taps, d in zip(window, dilation, strict=True))
        places = zip(call.shape_of(x)[-rank:], spans, stride, padding, strict=True)
        overhang = [overhang_of(extent, span, step, sides) for extent, span, step, sides in places]

    include = bool(call["count_include_pad"]) if call.has("count_include_pad") else False
    pool = functools.partial(pool_of, reduction, window, stride, padding, dilation, overhang, include)
    if rank == 3:
        return back(call.pool_volumes(x, pool(0, None), pool(1, 2)))
    return back(call.add(pool(0, 1) if rank == 2 else pool(None, 0), x))


def _adaptive_volume_pool(reduction: Literal["max", "mean"], call: Call) -> str:
    """As `_adaptive_pool`, where all windows are alike."""
    x, back = _volumes(call, "self")
    sizes, shape = call.pair("output_size", 3), call.shape_of(x)[2:]
    if all(new == 1 for new in sizes):
        return back(call.add(Reduce(reduction, (2, 3, 4)), x))
    if any(old % new for old, new in zip(shape, sizes, strict=True)):
        call.fail(f"output_size={sizes}: expected divisors of {shape}")
    window = tuple(old // new for old, new in zip(shape, sizes, strict=True))
    frames, images = ((window[0], 1), (window[1], window[2]))
    pools = (Pool(reduction=reduction, window=size, stride=size) for size in (frames, images))
    return back(call.pool_volumes(x, *pools))


def _adaptive_pool(reduction: Literal["max", "mean"], rank: int, call: Call) -> str:
    """Output i is made of what lies from `floor(i * old / new)` to before `ceil((i + 1) * old / new)`."""
    x, back = _images(call, "self", rank)
    sizes = _wide(call, "output_size", rank, 1)
    shape = call.shape_of(x)[2:]
    if all(new == 1 for new in sizes):
        return back(call.add(Reduce(reduction, (2, 3)), x))
    if all(old % new == 0 for old, new in zip(shape, sizes, strict=True)):
        window = (shape[0] // sizes[0], shape[1] // sizes[1])
        return back(x if window == (1, 1) else call.add(Pool(reduction=reduction, window=window, stride=window), x))
    if reduction == "max":
        call.fail(f"output_size={sizes}: expected divisors of {shape}")
    for axis, (old, new) in enumerate(zip(shape, sizes, strict=True), 2):
        places = [range(i * old // new, -(-(i + 1) * old // new)) for i in range(new)]
        most = max(map(len, places))
        indices = tuple((*found, *(found[-1],) * (most - len(found))) for found in places)
        # Of a window that is shorter than others the last place comes several times: by 0, infinities would become NaN.
        weights = tuple(tuple(1 / len(set(seen)) / seen.count(place) for place in seen) for seen in indices)
        x = call.add(Resize(axis, indices, weights), x)
    return back(x)


def _reduce(reduction: Literal["max", "mean", "sum"], call: Call) -> str:
    x, shape = call.value("self"), call.shape("self")
    axes = call.reduced_axes()
    y = call.add(Reduce(reduction, axes), x) if math.prod(shape) else call.fail(f"expected elements, got {shape}")
    return call.without(y, axes)


LOWERINGS: dict[str, Lowering] = {
    "aten::convolution": functools.partial(_convolution, None),
    "autoconv::conv2d": _own_convolution,
    "autoconv::conv_transpose2d": _own_convolution,
    **{f"aten::conv{n}d{kind}": functools.partial(_convolution, n) for n in (1, 2, 3) for kind in ("", ".padding")},
    "aten::conv_transpose1d": functools.partial(_convolution, 1),
    "aten::conv_transpose2d.input": functools.partial(_convolution, 2),
    **{f"aten::max_pool{n}d": functools.partial(_pool, "max", n) for n in (1, 2, 3)},
    **{f"aten::max_pool{n}d_with_indices": functools.partial(_pool, "max", n) for n in (2, 3)},
    **{f"aten::avg_pool{n}d": functools.partial(_pool, "mean", n) for n in (1, 2, 3)},
    **{f"aten::adaptive_avg_pool{n}d": functools.partial(_adaptive_pool, "mean", n) for n in (1, 2)},
    "aten::_adaptive_avg_pool2d": functools.partial(_adaptive_pool, "mean", 2),
    "aten::adaptive_max_pool2d": functools.partial(_adaptive_pool, "max", 2),
    "aten::adaptive_max_pool3d": functools.partial(_adaptive_volume_pool, "max"),
    "aten::adaptive_avg_pool3d": functools.partial(_adaptive_volume_pool, "mean"),
    "aten::_adaptive_avg_pool3d": functools.partial(_adaptive_volume_pool, "mean"),
    "aten::mean": functools.partial(_reduce, "mean"),
    "aten::mean.dim": functools.partial(_reduce, "mean"),
    "aten::sum": functools.partial(_reduce, "sum"),
    "aten::sum.dim_IntList": functools.partial(_reduce, "sum"),
    "aten::amax": functools.partial(_reduce, "max"),
}
