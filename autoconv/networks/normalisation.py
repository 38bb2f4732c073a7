"""Means, variances and what is made of them, in terms of our operators: what the readers have in common."""

from __future__ import annotations

import math

from autoconv.networks.operators.elementwise import NARROW, Elementwise
from autoconv.networks.operators.pooling import Reduce
from autoconv.networks.translation import Translation


def cast(call: Translation, x: str, dtype: str) -> str:
    """An array in another type; itself, where it has that."""
    return x if call.graph.types[x].dtype == dtype else call.add(Elementwise(0, dtype), x)


def wide(call: Translation, x: str) -> str:
    """Floats of 16 bits as float32: squares and sums do not fit into float16, and bfloat16 has too few digits."""
    return cast(call, x, "float32") if call.graph.types[x].dtype in NARROW else x


def centred(call: Translation, x: str, axes: tuple[int, ...]) -> str:
    """An array of mean 0 along axes."""
    return call.apply(("sub", 0, 1), x, call.add(Reduce("mean", axes), x))


def mean_square(call: Translation, x: str, axes: tuple[int, ...]) -> str:
    """The mean of an array's squares along axes, which stay with an extent of 1."""
    return call.add(Reduce("mean", axes), call.apply(("mul", 0, 0), x))


def scaled_down(call: Translation, x: str, axes: tuple[int, ...], epsilon: float) -> str:
    """An array over the root of its mean square along axes and `epsilon`."""
    return call.apply(("div", 0, ("sqrt", ("add", 1, epsilon))), x, mean_square(call, x, axes))


def normalised(call: Translation, x: str, axes: tuple[int, ...], epsilon: float) -> str:
    """An array of mean 0 along axes, and of variance 1 but for `epsilon`."""
    return scaled_down(call, centred(call, x, axes), axes, epsilon)


def normalised_in_groups(call: Translation, x: str, groups: int, epsilon: float) -> str:
    """Images as `images, groups, numbers of a group`, those of each group normalised."""
    shape = call.shape_of(x)
    return normalised(call, call.reshape(x, (shape[0], groups, math.prod(shape[1:]) // groups)), (2,), epsilon)


def affine(call: Translation, y: str, weight: str | None, bias: str | None, rest: int) -> str:
    """An array scaled and shifted by what is given, after whose axes so many others come."""
    for function, name in (("mul", weight), ("add", bias)):
        if name is not None:
            constant = wide(call, name)
            y = call.apply((function, 0, 1), y, call.reshape(constant, (*call.shape_of(constant), *(1,) * rest)))
    return y


def log_softmax(call: Translation, given: str, axis: int) -> str:
    """The logarithm of the softmax along an axis."""
    x = wide(call, given)
    below = call.apply(("sub", 0, 1), x, call.add(Reduce("max", (axis,)), x))
    total = call.add(Reduce("sum", (axis,)), call.apply(("exp", 0), below))
    return cast(call, call.apply(("sub", 0, ("log", 1)), below, total), call.graph.types[given].dtype)
