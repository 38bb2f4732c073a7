"""Kernels for pooling, reductions, softmax, LRN, resizing, padding and transposed matrices, of one shape each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from autoconv.cuda.codegen.expressions import number
from autoconv.cuda.codegen.source import Unit

Pair = tuple[int, int]
THREADS, BLOCKS = 256, 4
WARP = 32
SIDE = 32  # of the squares in transpose.cu
LARGE = 2**30  # elements, from which on positions take 64 bits
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


def word_of(dtype: str) -> str:
    """What carries an element of some type, bit by bit."""
    return WORDS[np.dtype(dtype).itemsize]


def _unit(function: str, file: str, blocks: int, text: str, largest: int, shared: int = 0) -> Unit:
    """A kernel that so many blocks run, of arrays of at most so many elements."""
    offset = f"using Offset = {'long long' if largest >= LARGE else 'int'};\n"
    return Unit(
        function, f"operators/{file}", None, (blocks, 1, 1), THREADS, BLOCKS, shared=shared, preamble=offset + text
    )


def one_each(function: str, file: str, outputs: int, text: str, largest: int) -> Unit:
    """A kernel with a thread for each output."""
    return _unit(function, file, -(-outputs // THREADS), f"constexpr Offset TOTAL = {outputs};\n{text}", largest)


def _constants(**values: int) -> str:
    return "".join(f"constexpr Offset {name} = {value};\n" for name, value in values.items())


def pool(
    reduction: Literal["max", "mean"],
    images: int,
    inner: int,
    size: Pair,
    out: Pair,
    window: Pair,
    stride: Pair,
    padding: tuple[Pair, Pair],
    dilation: Pair,
    include_padding: bool,
) -> Unit:
    """Pooling of so many images, whose pixels have `inner` neighbours in memory: channels in NHWC, 1 in NCHW.

    The arguments are otherwise those of `networks.operators.Pool`.
    """
    pads = padding if include_padding else ((0, 0), (0, 0))
    outputs = images * inner * math.prod(out)
    text = f"constexpr bool LARGEST = {str(reduction == 'max').lower()};\n" + _constants(
        INNER=inner, H=size[0], W=size[1], P=out[0], Q=out[1], WINDOW_H=window[0], WINDOW_W=window[1],
        STRIDE_H=stride[0], STRIDE_W=stride[1], DILATION_H=dilation[0], DILATION_W=dilation[1],
        PAD_TOP=padding[0][0], PAD_LEFT=padding[1][0], LOW_H=-pads[0][0], LOW_W=-pads[1][0],
        HIGH_H=size[0] + pads[0][1], HIGH_W=size[1] + pads[1][1],
    )  # fmt: skip
    return one_each("pool", "windows.cu", outputs, text, max(outputs, images * inner * math.prod(size)))


def reduction(kind: Literal["mean", "sum", "max"], shape: Sequence[int], axes: Sequence[int]) -> Unit:
    """The mean, sum or largest element of an array along some axes."""
    return _rows("reduce", shape, axes, maximum=kind == "max", mean=kind == "mean")


def softmax(shape: Sequence[int], axis: int) -> Unit:
    """Softmax of an array along an axis."""
    return _rows("softmax", shape, (axis,), maximum=True)


def normalization(
    shape: Sequence[int],
    axis: int,
    epsilon: float,
    centred: bool,
    affine: Literal["elements", "rows"] | None,
    period: int,
) -> Unit:
    """Normalised rows, and so many numbers of scale and shift; else as `networks.operators.Normalization` tells."""
    return _rows(
        "normalize", shape, range(axis, len(shape)), centred=centred, by_element=affine == "elements",
        by_row=affine == "rows", period=period, epsilon=epsilon,
    )  # fmt: skip


def _rows(
    function: str,
    shape: Sequence[int],
    axes: Sequence[int],
    *,
    maximum: bool = False,
    mean: bool = False,
    centred: bool = False,
    by_element: bool = False,
    by_row: bool = False,
    period: int = 1,
    epsilon: float = 0.0,
) -> Unit:
    """What is made of rows along axes: by a warp where their elements are neighbours, else by a thread each."""
    flags = {"MAXIMUM": maximum, "MEAN": mean, "CENTRED": centred, "BY_ELEMENT": by_element, "BY_ROW": by_row}
    kept = [axis for axis, extent in enumerate(shape) if axis not in axes and extent != 1]
    gone = [axis for axis in axes if shape[axis] != 1]
    lanes = WARP if gone and (not kept or max(gone) > max(kept)) else 1
    outputs, length = (math.prod(shape[axis] for axis in some) for some in (kept, gone))
    text = "".join(f"constexpr bool {name} = {str(flag).lower()};\n" for name, flag in flags.items())
    text += _constants(OUTPUTS=outputs, LENGTH=length, PERIOD=period) + f"constexpr int LANES = {lanes};\n"
    text += f"DEVICE float root_of(float mean_square) {{ return sqrtf(mean_square + {number(epsilon)}); }}\n"
    text += _position("first_of", kept, shape) + _position("further", gone, shape)
    largest = max(math.prod(shape), outputs * lanes) + THREADS * lanes  # threads are counted too
    return _unit(function, "rows.cu", -(-outputs * lanes // THREADS), text, largest)


def _position(name: str, axes: Sequence[int], shape: Sequence[int]) -> str:
    """A function of a number, which counts the places along some axes, to the element's position in an array."""
    terms, count = [], 1
    for axis in sorted(axes, reverse=True):
        terms.append(f"i / {count} % {shape[axis]} * {math.prod(shape[axis + 1 :])}")
        count *= shape[axis]
    return f"DEVICE Offset {name}(Offset i) {{ return {' + '.join(terms) or '0'}; }}\n"


def lrn(shape: Sequence[int], size: int, alpha: float, beta: float, bias: float) -> Unit:
    """Local response normalisation; the arguments are those of `networks.operators.LRN`."""
    total = math.prod(shape)
    text = _constants(INNER=math.prod(shape[2:]), CHANNELS=shape[1], BEFORE=(size - 1) // 2, AFTER=size // 2) + (
        f"DEVICE float divisor(float sum) {{\n    return powf({number(bias)} + {number(alpha / size)} * sum, "
        f"{number(beta)});\n}}\n"
    )
    return one_each("lrn", "lrn.cu", total, text, total + size * math.prod(shape[2:]))


def resize(outer: int, old: int, new: int, inner: int, taps: int) -> Unit:
    """Weighted sums along an axis, of the output, the input, places (new, taps) in int32 and as many weights."""
    text = _constants(INNER=inner, OLD=old, NEW=new) + f"constexpr int TAPS = {taps};\n"
    return one_each("resize", "resize.cu", outer * new * inner, text, outer * max(old, new) * inner)


def transpose(matrices: int, rows: int, columns: int, dtype: str) -> Unit:
    """Matrices with rows for columns."""
    blocks = matrices * -(-rows // SIDE) * -(-columns // SIDE)
    text = f"using Word = {word_of(dtype)};\n" + _constants(MATRICES=matrices, ROWS=rows, COLUMNS=columns)
    shared = SIDE * (SIDE + 1) * np.dtype(dtype).itemsize
    return _unit(
        "transpose", "transpose.cu", blocks, text, matrices * rows * columns + SIDE * max(rows, columns), shared
    )


def pad(shape: Sequence[int], before: Sequence[int], after: Sequence[int], value: float, dtype: str) -> Unit:
    """Elements around an array of a shape; the arguments are otherwise those of `networks.operators.Pad`."""
    word = word_of(dtype)
    fill = int(np.array(value).astype(dtype).view(f"u{np.dtype(dtype).itemsize}"))
    lines, out = [], [b + extent + a for b, extent, a in zip(before, shape, after, strict=True)]
    for axis in reversed(range(len(shape))):
        extent, step = shape[axis], math.prod(shape[axis + 1 :])
        lines += [f"    place = i % {out[axis]} - {before[axis]};", f"    i /= {out[axis]};"]
        lines += [f"    if (place < 0 || place >= {extent}) return -1;", f"    at += place * {step};"]
    body = "".join(f"{line}\n" for line in lines)
    text = (
        f"using Word = {word};\nconstexpr Word FILL = {fill}u{'ll' if word == WORDS[8] else ''};\n"
        f"DEVICE Offset source_of(Offset i) {{\n    Offset at = 0, place;\n{body}    return at;\n}}\n"
    )
    return one_each("pad", "pad.cu", math.prod(out), text, math.prod(out))
