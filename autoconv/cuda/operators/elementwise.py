"""Expressions of arrays, element by element, with any strides: activations, sums, broadcasts, copies, transposes.

Arrays may have different types. What is computed is computed in float32, and a copy is one of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoconv.common.arrays import Strides
from autoconv.common.epilogue.expressions import Expression
from autoconv.common.types import INTEGERS
from autoconv.cuda.codegen.expressions import text_of
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.operators.units import one_each, word_of

NAMES = ("a", "b", "c", "d", "e")  # of the inputs
MOST_INPUTS = len(NAMES)
TYPES = {"float32": "float", "int32": "int", "uint8": "unsigned char", "int8": "signed char"}


def elementwise(
    expression: Expression,
    shape: Sequence[int],
    strides: Sequence[Strides],
    types: Sequence[str],
    starts: Sequence[int] = (),
) -> Unit:
    """A kernel of the output and up to five inputs.

    Parameters
    ----------
    expression : Expression
        Of the inputs.
    shape : sequence of int
        Extents over which it goes.
    strides : sequence of tuple of int
        Of the output and of every input, in elements; they may be negative.
    types : sequence of str
        Of the output and of every input.
    starts : sequence of int
        The element of each array that is the first; all 0 where none are given.

    Returns
    -------
    Unit
    """
    copied = expression == 0 and len(set(types)) == 1
    kinds = [word_of(types[0])] * 2 if copied else [TYPES[dtype] for dtype in types]
    places = _places(shape, strides, starts or [0] * len(strides))
    read = [f"static_cast<const {kind}*>({name})[at_{name}]" for name, kind in zip(NAMES, kinds[1:], strict=False)]
    value = read[0] if copied else text_of(expression, [f"static_cast<float>({text})" for text in read])
    if not copied and types[0] in INTEGERS:
        limits = np.iinfo(types[0])
        value = f"held<{kinds[0]}>({value}, {float(limits.min)}f, {float(limits.max)}f)"
    arguments = ", ".join(f"const void* {name}" for name in NAMES)
    text = (
        f"using Stored = {kinds[0]};\n"
        f"DEVICE void store(Offset i, Stored* out, {arguments}) {{\n{places}    out[at_out] = {value};\n}}\n"
    )
    reach = max(sum((e - 1) * abs(s) for e, s in zip(shape, steps, strict=True)) for steps in strides)
    largest = max(reach + max((*starts, 0)), math.prod(shape))
    return one_each("elementwise", "elementwise.cu", math.prod(shape), text, largest)


def _places(shape: Sequence[int], strides: Sequence[Strides], starts: Sequence[int]) -> str:
    """Where element i lies in every array, in C++."""
    arrays = [f"at_{name}" for name in ("out", *NAMES[: len(strides) - 1])]
    lines = [f"    Offset {array} = {start};" for array, start in zip(arrays, starts, strict=True)]
    for axis in reversed(range(len(shape))):
        place = f"i % {shape[axis]}" if axis else "i"
        steps = " ".join(
            f"{array} += place * {steps[axis]};" for array, steps in zip(arrays, strides, strict=True) if steps[axis]
        )
        lines.append(f"    {{ const Offset place = {place}; {steps} }}" + (f" i /= {shape[axis]};" if axis else ""))
    return "".join(f"{line}\n" for line in lines)
