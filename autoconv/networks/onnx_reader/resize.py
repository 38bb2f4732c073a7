"""ONNX's Resize and Upsample: for each axis, which elements an output is made of, and with which weights.

The conventions are those of the operator's specification (ONNX, operators, Resize).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autoconv.networks.onnx_reader.call import Call
from autoconv.networks.operators.shapes import Resize

Coordinate = Callable[[int, float, int, int], float]  # of an output, by the scale and both extents

COORDINATES: Mapping[str, Coordinate] = {
    "half_pixel": lambda i, scale, old, new: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, old, new: (i + 0.5) / scale - 0.5 if new > 1 else 0.0,
    "half_pixel_symmetric": lambda i, scale, old, new: (
        old / 2 * (1 - new / (scale * old)) + (i + 0.5) / scale - 0.5
    ),
    "asymmetric": lambda i, scale, old, new: i / scale,
    "align_corners": lambda i, scale, old, new: i * (old - 1) / (scale * old - 1) if new > 1 else 0.0,
}  # fmt: skip
NEAREST: Mapping[str, Callable[[float], int]] = {
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
    "floor": math.floor,
    "ceil": math.ceil,
}


def _linear(distance: float, _: float) -> float:
    return max(1 - abs(distance), 0.0)


def _cubic(distance: float, a: float) -> float:
    """The kernel of Keys, "Cubic convolution interpolation for digital image processing" (1981), equation 3."""
    x = abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


KERNELS: Mapping[str, tuple[int, Callable[[float, float], float]]] = {"linear": (1, _linear), "cubic": (2, _cubic)}


class _Sampler:
    """What the attributes say of how an axis is sampled."""

    def __init__(self, call: Call, mode: str, coordinate: str, nearest: str) -> None:
        self.mode, self.antialias = mode, bool(call.attribute("antialias", 0))
        self.exclude, self.a = bool(call.attribute("exclude_outside", 0)), call.attribute("cubic_coeff_a", -0.75)
        for name, value, known in (
            ("mode", mode, ("nearest", *KERNELS)),
            ("coordinate_transformation_mode", coordinate, tuple(COORDINATES)),
            ("nearest_mode", nearest, tuple(NEAREST)),
        ):
            if value not in known:
                call.fail(f"{name}={value!r}: expected one of {', '.join(known)}")
        self.coordinate, self.nearest = COORDINATES[coordinate], NEAREST[nearest]

    def taps(self, old: int, new: int, scale: float) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
        """Indices and weights of every output of an axis."""
        indices: list[tuple[int, ...]] = []
        weights: list[tuple[float, ...]] = []
        for i in range(new):
            x = self.coordinate(i, scale, old, new)
            if self.mode == "nearest":
                indices.append((min(max(self.nearest(x), 0), old - 1),))
                weights.append((1.0,))
                continue
            reach, kernel = KERNELS[self.mode]
            stretch = min(scale, 1.0) if self.antialias else 1.0
            width = math.ceil(reach / stretch)
            places = range(math.floor(x) - width + 1, math.floor(x) + width + 1)
            found = [kernel((place - x) * stretch, self.a) for place in places]
            if self.exclude:
                found = [w if 0 <= place < old else 0.0 for w, place in zip(found, places, strict=True)]
            total = sum(found) if self.exclude or self.antialias else 1.0
            indices.append(tuple(min(max(place, 0), old - 1) for place in places))
            weights.append(tuple(w / total for w in found))
        return indices, weights


def _resized(call: Call, sampler: _Sampler, sizes: list[int], scales: list[float]) -> str:
    name = call.value(0)
    for axis, (old, new, scale) in enumerate(zip(call.type().shape, sizes, scales, strict=True)):
        if new < 1 or new > 1 << 16:
            call.fail(f"sizes={sizes}: expected extents from 1 to {1 << 16}")
        if (old, scale) != (new, 1.0):
            indices, weights = sampler.taps(old, new, scale)
            name = call.add(Resize(axis, tuple(indices), tuple(weights)), name)
    return name


def resize(call: Call) -> str:
    """The operator Resize."""
    shape = call.type().shape
    if call.opset < 11:
        return upsample(call)
    sampler = _Sampler(
        call,
        call.attribute("mode", "nearest"),
        call.attribute("coordinate_transformation_mode", "half_pixel"),
        call.attribute("nearest_mode", "round_prefer_floor"),
    )
    given = call.attribute("axes")
    axes = list(range(len(shape))) if given is None else [axis % len(shape) for axis in given]
    sizes, scales = list(shape), [1.0] * len(shape)
    if call.has(2) and call.constant(2, "scales").size:
        values = call.constant(2, "scales").reshape(-1)
        if len(values) != len(axes):
            call.fail(f"scales: expected {len(axes)}, got {len(values)}")
        for axis, scale in zip(axes, values, strict=True):
            scales[axis] = float(scale)
            sizes[axis] = math.floor(shape[axis] * float(scale))
        return _resized(call, sampler, sizes, scales)
    wanted = call.integers(3, "sizes")
    if wanted is None or len(wanted) != len(axes):
        call.fail(f"expected scales or {len(axes)} sizes, got {wanted}")
    policy = call.attribute("keep_aspect_ratio_policy", "stretch")
    ratios = [size / shape[axis] for axis, size in zip(axes, wanted, strict=True)]
    if policy != "stretch":
        ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(axes)
        wanted = tuple(math.floor(shape[axis] * ratios[0] + 0.5) for axis in axes)
    for axis, size, ratio in zip(axes, wanted, ratios, strict=True):
        sizes[axis], scales[axis] = size, ratio
    return _resized(call, sampler, sizes, scales)


def upsample(call: Call) -> str:
    """The operator Upsample, and Resize as it first was: output i is made of what lies at i / scale."""
    shape = call.type().shape
    values = call.constant(1, "scales").reshape(-1) if call.has(1) else call.attribute("scales")
    if values is None or len(values) != len(shape):
        call.fail(f"scales: expected {len(shape)}, got {values}")
    scales = [float(scale) for scale in values]
    mode = call.attribute("mode", "nearest")
    sampler = _Sampler(call, mode.removeprefix("bi") if mode == "bilinear" else mode, "asymmetric", "floor")
    return _resized(call, sampler, [math.floor(e * s) for e, s in zip(shape, scales, strict=True)], scales)
