"""ONNX's Resize and Upsample in terms of ours.

Scales are float32, and so are extents and coordinates that come from them, as in ONNX Runtime and PyTorch: 0.7 of ten
elements are seven, while 10 times the float32 next to 0.7 is less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoconv.common.types import INTEGERS
from autoconv.networks.onnx_reader.call import Call
from autoconv.networks.operators.elementwise import Elementwise
from autoconv.networks.operators.sampling import COORDINATES, KERNELS, NEAREST, Sampler

CROPPED = "tf_crop_and_resize"  # a mode of Resize of which nothing here knows
POLICIES = ("stretch", "not_larger", "not_smaller")  # of keeping the ratio between extents


def _sampler(call: Call, mode: str, coordinate: str, nearest: str) -> Sampler:
    """What the attributes say of how axes are sampled."""
    for name, value, known in (
        ("mode", mode, ("nearest", *KERNELS)),
        ("coordinate_transformation_mode", coordinate, tuple(COORDINATES)),
        ("nearest_mode", nearest, tuple(NEAREST)),
    ):
        if value not in known:
            call.fail(f"{name}={value!r}: expected one of {', '.join(known)}")
    return Sampler(
        mode=mode, coordinate=coordinate, nearest=nearest, antialias=bool(call.attribute("antialias", 0)),
        exclude=bool(call.attribute("exclude_outside", 0)), a=call.attribute("cubic_coeff_a", -0.75),
    )  # fmt: skip


def _resized(call: Call, x: str, sampler: Sampler, sizes: Sequence[int], scales: Sequence[float]) -> str:
    """The images in other extents; bytes are interpolated in float32 and cut to whole numbers, as by ONNX Runtime."""
    dtype = call.graph.types[x].dtype
    if dtype not in INTEGERS or sampler.mode == "nearest" or list(sizes) == list(call.shape_of(x)):
        return call.resize(x, sampler, sizes, scales)
    if sampler.mode != "linear" or sampler.antialias:
        call.fail(f"mode={sampler.mode!r}, antialias={sampler.antialias:d}: expected floats, got {dtype}")
    y = call.resize(call.add(Elementwise(0, "float32"), x), sampler, sizes, scales)
    return call.add(Elementwise(0, dtype), y)


def resize(call: Call) -> str | None:
    """The operator Resize."""
    shape = call.type().shape
    if call.opset < 11:
        return upsample(call)
    coordinate = call.attribute("coordinate_transformation_mode", "half_pixel")
    if coordinate == CROPPED:
        return None
    mode, nearest = call.attribute("mode", "nearest"), call.attribute("nearest_mode", "round_prefer_floor")
    sampler = _sampler(call, mode, coordinate, nearest)
    given = call.attribute("axes")
    axes = call.axes(given, len(shape))
    if given is not None:
        axes = tuple(axis % len(shape) for axis in given)  # in the order in which sizes are
    sizes = list(shape)
    scales: list[Any] = [1.0] * len(shape)
    if call.has(2) and call.constant(2, "scales").size:
        values = call.constant(2, "scales").reshape(-1)
        if len(values) != len(axes):
            call.fail(f"scales: expected {len(axes)}, got {len(values)}")
        for axis, scale in zip(axes, values, strict=True):
            scales[axis] = np.float32(scale)
            sizes[axis] = math.floor(shape[axis] * np.float32(scale))
        return _resized(call, call.value(0), sampler, sizes, scales)
    wanted = call.integers(3, "sizes")
    if wanted is None or len(wanted) != len(axes):
        call.fail(f"expected scales or {len(axes)} sizes, got {wanted}")
    policy = call.attribute("keep_aspect_ratio_policy", "stretch")
    if policy not in POLICIES:
        call.fail(f"keep_aspect_ratio_policy={policy!r}: expected one of {', '.join(POLICIES)}")
    ratios: list[Any] = [np.float32(size) / np.float32(shape[axis]) for axis, size in zip(axes, wanted, strict=True)]
    if policy != "stretch":
        ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(axes)
        wanted = tuple(math.floor(shape[axis] * ratios[0] + 0.5) for axis in axes)
    for axis, size, ratio in zip(axes, wanted, ratios, strict=True):
        sizes[axis], scales[axis] = size, ratio
    return _resized(call, call.value(0), sampler, sizes, scales)


def upsample(call: Call) -> str:
    """The operator Upsample, and Resize as it first was: output i is made of what lies at i / scale.

    Where Resize shrinks an axis, the nearest element is the one behind that place, as in the test of ONNX 1.5 for it
    and in ONNX Runtime. Upsample only ever enlarges, by the standard.
    """
    shape = call.type().shape
    values = call.constant(1, "scales").reshape(-1) if call.has(1) else call.attribute("scales")
    if values is None or len(values) != len(shape):
        call.fail(f"scales: expected {len(shape)}, got {values}")
    scales: list[Any] = [np.float32(scale) for scale in values]
    mode, x, sizes = call.attribute("mode", "nearest"), call.value(0), list(shape)
    shrinks = [call.operator == "Resize" and mode == "nearest" and scale < 1 for scale in scales]
    for nearest, shrinking in (("floor", False), ("ceil", True)):
        sampler = _sampler(call, mode.removeprefix("bi") if mode == "bilinear" else mode, "asymmetric", nearest)
        now = [scale if found == shrinking else 1.0 for scale, found in zip(scales, shrinks, strict=True)]
        sizes = [math.floor(extent * scale) for extent, scale in zip(sizes, now, strict=True)]
        x = _resized(call, x, sampler, sizes, now)
    return x
