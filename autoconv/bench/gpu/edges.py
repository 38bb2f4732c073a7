"""Small layers at the edges of what kernels do, and numbers for them: every test draws from these, on a GPU too."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoconv.layer import ConvLayer


def _problem(**fields: Any) -> dict[str, Any]:
    return fields


# name: forward problem; each is tested in every direction and layout
EDGES: dict[str, dict[str, Any]] = {
    "one": _problem(N=1, C=1, H=1, W=1, K=1, R=1, S=1),
    "plain": _problem(N=2, C=8, H=12, W=12, K=16, R=3, S=3, padding=1),
    "remainders": _problem(N=3, C=5, H=13, W=11, K=7, R=3, S=3, padding=1),
    "valid": _problem(N=1, C=3, H=9, W=14, K=4, R=3, S=3),
    "pointwise": _problem(N=2, C=17, H=7, W=12, K=19, R=1, S=1),
    "pointwise strided": _problem(N=2, C=6, H=9, W=8, K=4, R=1, S=1, stride=2),
    "pointwise padded": _problem(N=1, C=3, H=4, W=4, K=5, R=1, S=1, padding=1),
    "fully connected": _problem(N=4, C=6, H=5, W=5, K=10, R=5, S=5),
    "stem": _problem(N=1, C=3, H=35, W=35, K=8, R=11, S=11, stride=4),
    "strided": _problem(N=2, C=4, H=15, W=16, K=6, R=3, S=3, stride=2, padding=1),
    "stride skips pixels": _problem(N=1, C=2, H=14, W=13, K=3, R=2, S=1, stride=(4, 3)),
    "uneven strides": _problem(N=1, C=4, H=13, W=17, K=4, R=3, S=5, stride=(1, 3), padding=(1, 2)),
    "dilated": _problem(N=1, C=4, H=17, W=16, K=4, R=3, S=3, padding=2, dilation=2),
    "dilated strided": _problem(N=2, C=3, H=19, W=18, K=5, R=3, S=2, stride=(2, 3), padding=(3, 1), dilation=(3, 2)),
    "taps far apart": _problem(N=2, C=3, H=17, W=42, K=5, R=3, S=3, padding=(4, 20), dilation=(5, 20)),
    "asymmetric": _problem(N=1, C=3, H=10, W=9, K=4, R=3, S=3, padding=((0, 2), (1, 0))),
    "same strided": _problem(N=1, C=3, H=16, W=15, K=4, R=5, S=5, stride=2, padding="same"),
    "padding beyond the filter": _problem(N=1, C=2, H=3, W=4, K=3, R=2, S=2, padding=((4, 3), (5, 2)), stride=(2, 3)),
    "padding only": _problem(N=3, C=1, H=15, W=2, K=1, R=2, S=2, padding=((0, 1), (2, 0)), stride=(1, 3)),
    "filter beyond the image": _problem(N=1, C=2, H=3, W=2, K=3, R=5, S=7, padding=(2, 3)),
    "one window": _problem(N=2, C=3, H=3, W=4, K=4, R=5, S=4, padding=(1, 0)),
    "grouped": _problem(N=2, C=12, H=9, W=10, K=18, R=3, S=3, padding=1, groups=3),
    "depthwise": _problem(N=2, C=16, H=11, W=9, K=16, R=3, S=3, padding=1, groups=16),
    "depthwise strided": _problem(N=1, C=7, H=12, W=13, K=7, R=5, S=5, stride=2, padding=2, groups=7),
    "depthwise multiplier": _problem(N=1, C=5, H=8, W=7, K=10, R=3, S=3, padding=1, groups=5),
    "row filter": _problem(N=2, C=4, H=8, W=15, K=5, R=1, S=7, padding=(0, 3)),
    "column filter": _problem(N=2, C=4, H=15, W=8, K=5, R=7, S=1, padding=(3, 0)),
    "one-dimensional": _problem(N=2, C=3, H=1, W=40, K=5, R=1, S=9, stride=(1, 2), padding=(0, 4)),
    "even filter": _problem(N=1, C=3, H=8, W=8, K=3, R=4, S=2, padding=1),
    "five by five": _problem(N=2, C=5, H=14, W=13, K=6, R=5, S=5, padding=2),
    "large filter": _problem(N=1, C=3, H=20, W=22, K=4, R=13, S=15, padding=(6, 7)),
    "many images": _problem(N=19, C=3, H=4, W=5, K=5, R=3, S=3, padding=1),
    "many channels": _problem(N=1, C=150, H=5, W=6, K=139, R=3, S=3, padding=1),
    "long": _problem(N=1, C=2, H=3, W=700, K=3, R=3, S=3, padding=1),
    "tall": _problem(N=1, C=2, H=90, W=17, K=3, R=3, S=3, padding=1),
}
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "prelu": {"activation": "prelu"},
    "bias residual relu": {"bias": True, "residual": True, "activation": "relu"},
}


def edge(name: str, **changes: Any) -> ConvLayer:
    """An edge of the list as a layer."""
    return ConvLayer(**(EDGES[name] | changes))


def edges(**changes: Any) -> dict[str, ConvLayer]:
    """Every edge as a layer, with the same changes."""
    return {name: edge(name, **changes) for name in EDGES}


def operands(layer: ConvLayer, seed: int = 0) -> tuple[Any, Any, Any | None, Any | None]:
    """`a, b, bias, residual` for a layer, in its dtype; None where it has none.

    Of either sign and between 1/2 and 3/2: where an output has a single term, the error of algorithms
    that mix it with its neighbours cannot be measured against an accidentally tiny one.
    """
    generator = np.random.default_rng(seed)

    def numbers(shape: tuple[int, ...]) -> Any:
        signs = generator.integers(0, 2, shape) * 2 - 1
        return (signs * generator.uniform(0.5, 1.5, shape)).astype(layer.numpy_dtype)

    a, b = map(numbers, layer.input_shapes)
    bias = numbers((layer.channel_values,)) if layer.channel_values else None
    return a, b, bias, numbers(layer.output_shape) if layer.residual else None
