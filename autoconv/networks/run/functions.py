"""Functions of a node's arrays, for what no kernel of ours can be called for directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.epilogue import activations
from autoconv.common.epilogue.quantization import Quantization
from autoconv.networks.operators import Concat, Operator, Pad, Slice, Transpose
from autoconv.networks.operators.elementwise import NARROW
from autoconv.plans import Plan


def named(name: str, function: Callable[..., Array]) -> Callable[..., dict[str, Array]]:
    """A function of arrays, whose result gets the name of its node."""
    return lambda *arrays: {name: function(*arrays)}


def by_numpy(operator: Operator, dtypes: Sequence[str]) -> Callable[..., Array]:
    """What NumPy makes of arrays of such types, of which the output's is the last.

    Floats of 16 bits are computed with in float32 and rounded once, as kernels do: sums in their own type stall early.
    """
    if not {*NARROW}.intersection(dtypes) or isinstance(operator, Concat | Pad | Slice | Transpose):
        return operator.evaluate

    def run(*arrays: Array) -> Array:
        y = operator.evaluate(*(a.astype(np.float32) if a.dtype.name in NARROW else a for a in arrays))
        with np.errstate(over="ignore"):
            return y.astype(dtypes[-1])

    return run


def function_of(made: Plan, constant: Array | None) -> Any:
    """A function of a node's arrays that runs a plan, with filters packed now where they are known."""
    layer = made.layer
    a_shape, b_shape = layer.input_shapes
    packed = None if constant is None else made.pack(constant.reshape(b_shape))

    def run(*arrays: Array) -> Array:
        x, w, *rest = arrays
        bias: Array | Quantization | None
        bias, slope = activations.parted(rest[0] if layer.channel_values else None, layer.bias, layer.activation)
        if layer.quantized:
            bias = Quantization.of_words(layer, rest[0])
        residual = rest[-1].reshape(layer.output_shape) if layer.residual else None
        filters = w.reshape(b_shape) if packed is None else packed
        return made.run(x.reshape(a_shape), filters, bias, residual, slope=slope)

    return run
