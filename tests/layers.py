"""The layers every test draws from: the edges that come with the package, and the whole space for Hypothesis."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from scipy import special

from autoconv.algorithm import Algorithm, Candidate
from autoconv.bench.gpu.edges import EDGES, EPILOGUES, edge, edges, operands
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer

__all__ = [
    "ACTIVATIONS", "EDGES", "EPILOGUES", "SLOPE", "depthwise", "edge", "edges", "everyday", "hopper_layer", "layers",
    "operands",
]  # fmt: skip

SLOPE = -0.3  # that of PReLU here; in layers every channel has its own
# By what others make of them.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda y: np.where(y > 0, y, 0),
    "clip:-0.5:1.5": lambda y: np.clip(y, -0.5, 1.5),
    "leaky_relu:0.25": lambda y: np.where(y > 0, y, 0.25 * y),
    "prelu": lambda y: np.where(y > 0, y, SLOPE * y),
    "sigmoid": special.expit,
    "silu": lambda y: y * special.expit(y),
    "hardsigmoid": lambda y: np.clip(y + 3, 0, 6) / 6,
    "hardswish": lambda y: y * np.clip(y + 3, 0, 6) / 6,
    "gelu": lambda y: y * special.ndtr(y),
    "gelu_tanh": lambda y: y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
}


def depthwise(**fields: Any) -> ConvLayer:
    """A small depthwise layer, with a filter for every channel unless there are said to be more."""
    given = {"N": 2, "C": 5, "H": 11, "W": 9, "R": 3, "S": 3, "padding": 1} | fields
    return ConvLayer(**({"K": given["C"], "groups": given["C"]} | given))


def hopper_layer(**fields: Any) -> ConvLayer:
    """A small layer that Hopper's copy engine can walk through."""
    given = {"N": 2, "C": 64, "H": 9, "W": 8, "K": 64, "R": 3, "S": 3, "padding": 1}
    return ConvLayer(**(given | {"dtype": "float16", "layout": "NHWC"} | fields))


@st.composite
def layers(draw: st.DrawFn, **fixed: Any) -> ConvLayer:
    """Any valid layer with small extents; some fields may be fixed."""

    def small(least: int, most: int) -> int:
        return draw(st.integers(least, most))

    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    fields: dict[str, Any] = {
        "N": small(1, 3),
        "groups": groups,
        "dtype": draw(st.sampled_from(["float32", "float32", *DTYPES])),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "direction": draw(st.sampled_from(DIRECTIONS)),
    }
    depthwise = draw(st.integers(0, 3)) == 0
    fields["C"] = groups * (1 if depthwise else small(1, 6))
    fields["K"] = groups * small(1, 6)
    sizes: dict[str, tuple[int, int]] = {}
    square = small(1, 5) if draw(st.booleans()) else 0
    for image, taps in (("H", "R"), ("W", "S")):
        fields[taps] = square or small(1, 5)
        # Unit stride and dilation are what most algorithms want, and most networks have.
        stride, dilation = (draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(2))
        before, after = small(0, 4), small(0, 4)
        span = (fields[taps] - 1) * dilation + 1
        least = max(1, span - before - after)
        fields[image] = small(least, least + 14)
        sizes[image] = (stride, dilation)
        fields.setdefault("padding", ())
        fields["padding"] += ((before, after),)
    fields["stride"], fields["dilation"] = zip(sizes["H"], sizes["W"], strict=True)
    if fields["direction"] != "wgrad":
        fields |= {"bias": draw(st.booleans()), "residual": draw(st.booleans())}
        fields["activation"] = draw(st.sampled_from([None, "relu", *ACTIVATIONS]))
    return ConvLayer(**(fields | fixed))


def everyday(algorithm: Algorithm, layer: ConvLayer, candidates: list[Candidate]) -> list[Candidate]:
    """All candidates of the NumPy algorithms; of one that builds slowly only one, another for each layer."""
    if algorithm.name.startswith("numpy."):
        return candidates
    return candidates and [candidates[zlib.crc32(layer.key().encode()) % len(candidates)]]
