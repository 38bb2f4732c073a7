"""Activations as expressions of input 0: written once, so that passes know them whichever reader they come from."""

from __future__ import annotations

import math

from autoconv.common.epilogue.activations import PLAIN
from autoconv.common.epilogue.expressions import Expression

SILU, GELU, GELU_TANH, HARD_SWISH = (PLAIN[name] for name in ("silu", "gelu", "gelu_tanh", "hardswish"))

RSQRT: Expression = ("div", 1.0, ("sqrt", 0))
SOFTPLUS: Expression = ("add", ("max", 0, 0.0), ("log1p", ("exp", ("neg", ("abs", 0)))))
MISH: Expression = ("mul", 0, ("tanh", SOFTPLUS))


def clip(low: float | None, high: float | None) -> Expression:
    """Bounds; a low one of -inf and a high one of inf are none, while the largest finite number is one."""
    expression: Expression = 0
    for function, bound, none in (("max", low, -math.inf), ("min", high, math.inf)):
        if bound is not None and bound != none:
            expression = ("relu", expression) if (function, bound) == ("max", 0.0) else (function, expression, bound)
    return expression


def hard_sigmoid(alpha: float = 1 / 6, beta: float = 0.5) -> Expression:
    """A line from 0 to 1."""
    return ("min", ("max", ("add", ("mul", 0, alpha), beta), 0.0), 1.0)


def elu(alpha: float) -> Expression:
    """Linear where positive, `alpha * (exp(x) - 1)` elsewhere."""
    return ("add", ("max", 0, 0.0), ("mul", alpha, ("sub", ("exp", ("min", 0, 0.0)), 1.0)))


def power(exponent: float) -> Expression:
    """A power, by quicker functions where there are any."""
    quicker: dict[float, Expression] = {
        1.0: 0,
        2.0: ("mul", 0, 0),
        0.5: ("sqrt", 0),
        -0.5: RSQRT,
        -1.0: ("div", 1.0, 0),
    }
    return quicker.get(exponent, ("pow", 0, exponent))
