"""`Quantization`: what the integers of a quantised layer stand for."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from autoconv.common.types import INTEGERS, LARGEST_FACTORS
from autoconv.errors import ArrayError

if TYPE_CHECKING:
    from autoconv.layer import ConvLayer

MOST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Quantization:
    """What the integers of a quantised layer stand for, which `Plan.run` takes in the place of a bias.

    The sums are `s = sum((x - x_zero_point) * w) + bias`, in int32; padding is `x_zero_point`. An output of int32 is s
    itself, one of float32 is `float32(s) * scale`, and one of uint8 or int8 is that, rounded to the nearest integer (a
    tie to the even one), plus `y_zero_point`, held to the type's range. A layer with ReLU counts what is below zero
    (of uint8 and int8, below `y_zero_point`) as that. Every step is exact or rounds once in float32, so that all
    algorithms give the same bits. It is what ONNX's QLinearConv and ConvInteger say of filters whose zero point is 0;
    `conv2d_quantized` takes others. Source: Jacob et al. (2018), arXiv:1712.05877, equation 7.

    Parameters
    ----------
    scale : float or array of K floats
        All positive, and neither subnormal nor infinite in float32: of QLinearConv, `x_scale * w_scale / y_scale`; of
        an output of float32, `x_scale * w_scale`; an output of int32 has none, and 1 stands for that. Arrays are
        copied, here and as the bias.
    x_zero_point, y_zero_point : int
        What stands for 0 in the input and in the output, in their types' ranges; of int32 and float32, 0.
    bias : array of K integers, optional
        Added to the sums: int32, in units of `x_scale * w_scale`.

    Examples
    --------
    >>> from autoconv import ConvLayer, plan
    >>> layer = ConvLayer(N=1, C=2, H=3, W=3, K=1, R=3, S=3, dtype="uint8", output_dtype="int8")
    >>> x, w = np.full(layer.x_shape, 130, np.uint8), np.ones(layer.w_shape, np.int8)
    >>> meaning = Quantization(scale=0.25, x_zero_point=128, y_zero_point=1)
    >>> int(plan(layer, "heuristic").run(x, w, meaning)[0, 0, 0, 0])
    10
    """

    scale: Any = 1.0
    x_zero_point: int = 0
    y_zero_point: int = 0
    bias: Any = None
    _operands: dict[ConvLayer, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("scale", "bias"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))  # a copied tensor shares its memory

    def operand(self, layer: ConvLayer) -> Any:
        """What a kernel of the layer takes in the place of a bias.

        Parameters
        ----------
        layer : ConvLayer
            A quantised one.

        Returns
        -------
        array of 2K + 2 words of int32
            The bias; the bits of the scales in float32; both zero points.

        Raises
        ------
        ArrayError
            For scales or a bias of a wrong number, scales that are not positive and finite, zero points outside the
            range of their types, and sums that a bias could make overflow.
        """
        if layer not in self._operands:
            self._operands[layer] = self._checked(layer)
        return self._operands[layer]

    @classmethod
    def of_words(cls, layer: ConvLayer, words: Any) -> Quantization:
        """The one whose operand these words are.

        Parameters
        ----------
        layer : ConvLayer
        words : array of int32

        Returns
        -------
        Quantization
        """
        bias, scale, x_zero_point, y_zero_point = meanings(layer, words)
        return cls(scale, x_zero_point, y_zero_point, bias)

    def _checked(self, layer: ConvLayer) -> Any:
        scale = positive("scale", self.scale, layer.K)
        if layer.output_dtype == "int32" and (scale != 1).any():
            raise ArrayError(f"scale={self.scale!r}: expected 1, as the output of {layer} is int32")
        zero_points = []
        for name, dtype in (("x_zero_point", layer.dtype), ("y_zero_point", layer.output_dtype)):
            limits = np.iinfo(INTEGERS[dtype]) if dtype in INTEGERS else None
            low, high = (limits.min, limits.max) if limits else (0, 0)
            value = _array(getattr(self, name))
            if value.size != 1 or value.dtype.kind not in "iu" or not low <= int(value.item()) <= high:
                raise ArrayError(
                    f"{name}={getattr(self, name)!r}: expected an integer from {low} to {high} for {dtype}"
                )
            zero_points.append(int(value.item()))
        bias = np.zeros(layer.K, np.int64) if self.bias is None else _array(self.bias)
        if bias.shape != (layer.K,) or bias.dtype.kind not in "iu":
            raise ArrayError(f"bias: expected K={layer.K} integers, got {bias.dtype} {bias.shape}")
        terms = layer.C // layer.groups * layer.R * layer.S
        room = MOST - terms * LARGEST_FACTORS[0] * LARGEST_FACTORS[1]
        over = (bias > room) | (bias < -room)
        if over.any():
            at = int(over.argmax())
            raise ArrayError(
                f"bias[{at}]={bias[at]}: expected at most {room} either way, as sums of {terms} products could overflow"
            )
        words = np.empty(2 * layer.K + 2, np.int32)
        words[: layer.K] = bias
        words[layer.K : 2 * layer.K] = np.broadcast_to(scale.reshape(-1), (layer.K,)).view(np.int32)
        words[2 * layer.K :] = zero_points
        return words


def _array(value: Any) -> Any:
    """What was given as an array; one of no numbers where it cannot be one."""
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.array(None)


def positive(name: str, value: Any, K: int | None = None) -> Any:
    """A scale, or where there may be one for each of K filters also those, as float32.

    Raises
    ------
    ArrayError
        For another number of them, and for what is not a positive normal number of float32.
    """
    given = _array(value)
    if given.dtype.kind not in "iuf" and given.dtype.name != "bfloat16":
        raise ArrayError(f"{name}={value!r}: expected numbers")
    with np.errstate(over="ignore"):
        scale = given.astype(np.float32)
    if scale.shape not in ((), (1,), (K,)):
        expected = "one value" if K is None else f"one value or K={K}"
        raise ArrayError(f"{name}: expected {expected}, got shape {scale.shape}")
    wrong = ~((scale >= np.finfo(np.float32).tiny) & np.isfinite(scale))
    if wrong.any():
        at = int(wrong.reshape(-1).argmax())
        raise ArrayError(f"{name}[{at}]={float(given.reshape(-1)[at])}: expected a positive normal number of float32")
    return scale


def operand_of(layer: ConvLayer, given: object) -> Any:
    """The words of a `Quantization` that was given to a plan of a layer.

    Raises
    ------
    ArrayError
        When it is none, or does not fit the layer.
    """
    if not isinstance(given, Quantization):
        raise ArrayError(f"bias: expected a Quantization, as {layer} is quantised, got {type(given).__name__}")
    return given.operand(layer)


def meanings(layer: ConvLayer, words: Any) -> tuple[Any, Any, int, int]:
    """The parts of an operand: bias, scales, zero points of input and output."""
    K = layer.K
    return words[:K], words[K : 2 * K].view(np.float32), int(words[2 * K]), int(words[2 * K + 1])


def finished(layer: ConvLayer, sums: Any, words: Any, channel: int) -> Any:
    """The output of sums without bias, by NumPy: what `Quantization` says, step by step.

    Parameters
    ----------
    layer : ConvLayer
    sums : array of int32, or of whole numbers in another type
    words : array of int32
        The operand.
    channel : int
        The axis of the filters.

    Returns
    -------
    array of the layer's output_dtype
    """
    bias, scale, _, zero = meanings(layer, words)
    shape = [1] * sums.ndim
    shape[channel] = layer.K
    total = sums.astype(np.int32) + bias.reshape(shape)
    if layer.activation == "relu":
        total = np.maximum(total, 0)
    if layer.output_dtype == "int32":
        return total
    scaled = total.astype(np.float32) * scale.reshape(shape)
    if layer.output_dtype == "float32":
        return scaled
    limits = np.iinfo(layer.output_numpy_dtype)
    rounded = np.clip(np.rint(scaled), limits.min - zero, limits.max - zero).astype(np.int32)
    return (rounded + zero).astype(layer.output_numpy_dtype)
