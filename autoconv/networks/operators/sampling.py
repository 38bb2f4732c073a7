"""How an axis is resized: for each output, which elements it is made of, and with which weights.

The conventions have the names that the specification of ONNX gives them (operators, Resize).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A convention.

    Parameters
    ----------
    mode : str
        "nearest", or one of `KERNELS`.
    coordinate : str
        One of `COORDINATES`: where in the input an output lies.
    nearest : str
        One of `NEAREST`: which element that is, in mode "nearest".
    antialias : bool
        Whether the kernel widens where the axis shrinks.
    exclude : bool
        Whether elements beyond the ends count for nothing, and not as the last one does.
    a : float
        The parameter of the cubic kernel.
    """

    mode: str
    coordinate: str
    nearest: str = "floor"
    antialias: bool = False
    exclude: bool = False
    a: float = -0.75

    def resize(self, axis: int, old: int, new: int, scale: float) -> Resize:
        """From one extent to another, of which the scale is the ratio, or nearly; coordinates are of its precision."""
        indices: list[tuple[int, ...]] = []
        weights: list[tuple[float, ...]] = []
        for i in range(new):
            x = float(COORDINATES[self.coordinate](i, scale, old, new))
            if self.mode == "nearest":
                indices.append((min(max(NEAREST[self.nearest](x), 0), old - 1),))
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
            weights.append(tuple(float(w / total) for w in found))
        return Resize(axis, tuple(indices), tuple(weights))
