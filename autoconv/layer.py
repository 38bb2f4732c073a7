"""`ConvLayer`: one convolution problem, complete and canonical."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from autoconv.common import arguments
from autoconv.common.epilogue import activations
from autoconv.common.types import DTYPES as DTYPES  # whose name belongs to layers
from autoconv.common.types import INTEGERS, MOST_TERMS, SUMS, dtype_name, output_name
from autoconv.errors import LayerError

Pair = tuple[int, int]
Sides = tuple[Pair, Pair]
Shape = tuple[int, ...]
Direction = Literal["fwd", "dgrad", "wgrad"]
Layout = Literal["NCHW", "NHWC"]
LAYOUTS = ("NCHW", "NHWC")
DIRECTIONS = ("fwd", "dgrad", "wgrad")
GROUPINGS = ("dense", "grouped", "depthwise")
EXTENTS = ("N", "C", "H", "W", "K", "R", "S")


@dataclass(frozen=True, kw_only=True)
class ConvLayer:
    """One 2-D convolution (cross-correlation, as in every framework), described by its forward problem.

    `N C H W` are the extents of the input, `K R S` those of the filters, `P Q` (computed) those of
    the output. A 1-D convolution is one of height 1. Layers that describe the same problem are equal.

    Parameters
    ----------
    N, C, H, W, K, R, S : int
        Images, input channels, height, width, filters, filter height, filter width; all at least 1.
    stride : int or (height, width)
        Pixels from one output's window to the next.
    padding : int, (height, width), ((top, bottom), (left, right)), "same" or "valid"
        Rows and columns of zeros around the input. "same" gives `P = ceil(H / stride)`, the odd pixel
        going to the bottom and the right; "valid" is 0.
    dilation : int or (height, width)
        Pixels from one tap of a filter to the next.
    groups : int
        Divides both C and K; filters then see `C / groups` channels.
    dtype : "float32", "float64", "float16", "bfloat16", "uint8" or "int8", or a NumPy dtype of that name
        Of the arrays; sums are kept in float32 at least. A layer of "uint8" or "int8" is quantised: its filters are
        int8, its sums int32, and a `Quantization` says what its integers stand for.
    layout : "NCHW" or "NHWC"
        Of the arrays: `N,C,H,W` with filters `K,C,R,S`, or `N,H,W,C` with filters `K,R,S,C`.
    direction : "fwd", "dgrad" or "wgrad"
        What is computed: `y` from `(x, w)`, `dx` from `(dy, w)`, or `dw` from `(x, dy)`.
    bias, residual : bool
        Whether the epilogue adds a bias (of `output_channels` values) and a residual (of the output's shape).
    activation : str, optional
        What the epilogue ends with: `y = activation(conv(x, w) + bias + residual)`, not for "wgrad": "relu", "relu6",
        "clip:LOW:HIGH", "leaky_relu[:SLOPE]", "sigmoid", "silu", "hardsigmoid", "hardswish", "gelu", "gelu_tanh", or
        "prelu", whose slopes, one for each channel of the output, are an operand. Numbers are kept in float32.
    output_dtype : "int32", "uint8", "int8" or "float32", or a NumPy dtype of that name
        Of the output of a quantised layer; by default the "int32" of its sums. Of others it is their dtype.

    Raises
    ------
    LayerError
        For a wrong type, an extent out of range, groups that do not divide, an empty output, an
        epilogue on the filters' gradient, or int32 sums that could overflow.

    Examples
    --------
    >>> layer = ConvLayer(N=1, C=3, H=227, W=227, K=96, R=11, S=11, stride=4)
    >>> layer.y_shape, layer.flops
    ((1, 96, 55, 55), 210830400)
    >>> ConvLayer.parse(layer.key()) == layer
    True
    """

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: Pair = (1, 1)
    padding: Sides = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    dtype: str = "float32"
    layout: Layout = "NCHW"
    direction: Direction = "fwd"
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    output_dtype: str = "float32"

    def __init__(
        self,
        *,
        N: int,
        C: int,
        H: int,
        W: int,
        K: int,
        R: int,
        S: int,
        stride: int | Pair = 1,
        padding: int | Pair | Sides | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        dtype: Any = "float32",
        layout: str = "NCHW",
        direction: str = "fwd",
        bias: bool = False,
        residual: bool = False,
        activation: str | None = None,
        output_dtype: Any = None,
    ) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, value in zip(EXTENTS, (N, C, H, W, K, R, S), strict=True):
            put(name, arguments.integer(value, name, 1))
        put("stride", arguments.pair(stride, "stride", 1))
        put("dilation", arguments.pair(dilation, "dilation", 1))
        put("groups", arguments.integer(groups, "groups", 1))
        put("dtype", dtype_name(dtype))
        put("output_dtype", output_name(output_dtype, self.dtype))
        put("layout", arguments.choice(layout, "layout", LAYOUTS))
        put("direction", arguments.choice(direction, "direction", DIRECTIONS))
        put("activation", activations.canonical(activation))
        put("bias", arguments.truth(bias, "bias"))
        put("residual", arguments.truth(residual, "residual"))
        put("padding", arguments.sides(padding, (self.H, self.W), self.filter_extent, self.stride))
        for name, extent in (("C", self.C), ("K", self.K)):
            if extent % self.groups:
                raise LayerError(f"groups={self.groups}: it must divide {name}={extent}")
        for axis, filter_name, index in (("H", "R", 0), ("W", "S", 1)):
            padded = getattr(self, axis) + sum(self.padding[index])
            if self.filter_extent[index] > padded:
                raise LayerError(
                    f"{filter_name}={getattr(self, filter_name)} with dilation {self.dilation[index]} spans "
                    f"{self.filter_extent[index]}, more than the padded {axis} of {padded}: the output is empty"
                )
        if self.direction == "wgrad" and self.has_epilogue:
            raise LayerError("direction='wgrad': bias, residual and activation are allowed for 'fwd' and 'dgrad' only")
        if not self.quantized:
            return
        if self.direction != "fwd" or self.bias or self.residual:
            raise LayerError(f"dtype={self.dtype!r}: expected direction='fwd', no residual, a bias in its Quantization")
        if self.activation not in (None, "relu"):
            raise LayerError(f"activation={self.activation!r}: expected None or 'relu' where dtype={self.dtype!r}")
        if (terms := self.C // self.groups * self.R * self.S) > MOST_TERMS:
            limit = f"at most {MOST_TERMS} products in a sum, as more could overflow int32"
            raise LayerError(f"dtype={self.dtype!r}: expected {limit}, got C/groups * R * S = {terms}")

    @property
    def filter_extent(self) -> Pair:
        """Rows and columns a dilated filter spans."""
        return (self.R - 1) * self.dilation[0] + 1, (self.S - 1) * self.dilation[1] + 1

    @property
    def P(self) -> int:
        """Output height."""
        return (self.H + sum(self.padding[0]) - self.filter_extent[0]) // self.stride[0] + 1

    @property
    def Q(self) -> int:
        """Output width."""
        return (self.W + sum(self.padding[1]) - self.filter_extent[1]) // self.stride[1] + 1

    def _images(self, channels: int, height: int, width: int) -> Shape:
        return (self.N, channels, height, width) if self.layout == "NCHW" else (self.N, height, width, channels)

    @property
    def x_shape(self) -> Shape:
        """Shape of the input, in the layer's layout."""
        return self._images(self.C, self.H, self.W)

    @property
    def w_shape(self) -> Shape:
        """Shape of the filters: `K, C/groups, R, S`, or `K, R, S, C/groups` for NHWC."""
        channels = self.C // self.groups
        return (self.K, channels, self.R, self.S) if self.layout == "NCHW" else (self.K, self.R, self.S, channels)

    @property
    def y_shape(self) -> Shape:
        """Shape of the output, in the layer's layout."""
        return self._images(self.K, self.P, self.Q)

    @property
    def input_shapes(self) -> tuple[Shape, Shape]:
        """Shapes of the two operands that `Plan.run` takes: (x, w), (dy, w) or (x, dy)."""
        x, w, y = self.x_shape, self.w_shape, self.y_shape
        return {"fwd": (x, w), "dgrad": (y, w), "wgrad": (x, y)}[self.direction]

    @property
    def output_shape(self) -> Shape:
        """Shape of what `Plan.run` gives: y, dx or dw."""
        return {"fwd": self.y_shape, "dgrad": self.x_shape, "wgrad": self.w_shape}[self.direction]

    @property
    def output_channels(self) -> int:
        """Channels of the output, or of wgrad's the filters: as many values as a bias has."""
        return self.C if self.direction == "dgrad" else self.K

    @property
    def channel_values(self) -> int:
        """How many values the epilogue takes for channels: all biases, if it adds them, then all slopes of PReLU."""
        return self.output_channels * (self.bias + activations.has_slopes(self.activation))

    @property
    def has_epilogue(self) -> bool:
        """Whether anything is done to the sums: a bias or a residual is added, or an activation applied."""
        return self.bias or self.residual or self.activation is not None

    @property
    def quantized(self) -> bool:
        """Whether the arrays are integers that a `Quantization` gives a meaning."""
        return self.dtype in INTEGERS

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Type of the arrays; of a quantised layer, of its input."""
        return (DTYPES | INTEGERS)[self.dtype]

    @property
    def w_numpy_dtype(self) -> np.dtype[Any]:
        """Type of the filters."""
        return INTEGERS["int8"] if self.quantized else self.numpy_dtype

    @property
    def output_numpy_dtype(self) -> np.dtype[Any]:
        """Type of the output."""
        return (DTYPES | INTEGERS | SUMS)[self.output_dtype]

    @property
    def accumulator(self) -> np.dtype[Any]:
        """Type in which sums are kept: float64 for float64, int32 for integers, else float32."""
        if self.quantized:
            return SUMS["int32"]
        return DTYPES["float64" if self.dtype == "float64" else "float32"]

    @property
    def itemsize(self) -> int:
        """Bytes of one array element."""
        return self.numpy_dtype.itemsize

    @property
    def macs(self) -> int:
        """Multiply-adds of the direct algorithm, padding included, the same in every direction."""
        return self.N * self.K * self.P * self.Q * (self.C // self.groups) * self.R * self.S

    @property
    def flops(self) -> int:
        """Twice the multiply-adds, as the field counts."""
        return 2 * self.macs

    @property
    def bytes(self) -> int:
        """Least memory traffic: every operand once."""
        inputs = [self.x_shape, self.w_shape] + [self.output_shape] * self.residual
        outputs = math.prod(self.y_shape) * self.output_numpy_dtype.itemsize
        return self.itemsize * (sum(map(math.prod, inputs)) + self.channel_values) + outputs

    @property
    def arithmetic_intensity(self) -> float:
        """Operations per byte of least traffic."""
        return self.flops / self.bytes

    @property
    def depthwise(self) -> bool:
        """Whether every filter sees a single channel."""
        return self.groups > 1 and self.groups == self.C

    @property
    def grouping(self) -> str:
        """How channels meet filters: "dense" (every one meets all), "grouped", or "depthwise" (each meets its own)."""
        return "depthwise" if self.depthwise else "grouped" if self.groups > 1 else "dense"

    @property
    def sees_padding_only(self) -> bool:
        """Whether every tap of every output falls on padding: the sums are 0, whatever the input is."""
        return not all(map(self._meets_input, (0, 1)))

    def _meets_input(self, axis: int) -> bool:
        """Whether any tap of any output falls inside the input, on one axis."""
        taps, inputs, outputs = ((self.R, self.H, self.P), (self.S, self.W, self.Q))[axis]
        step = self.stride[axis]
        places = (tap * self.dilation[axis] - self.padding[axis][0] for tap in range(taps))  # of the first output
        return any(max(first, first % step) < min(inputs, first + outputs * step) for first in places)

    def key(self) -> str:
        """The canonical, readable text of the layer; what is at its default is left out.

        Returns
        -------
        str
            What `parse` reads, and what records are kept under.

        Examples
        --------
        >>> ConvLayer(N=8, C=64, H=56, W=56, K=64, R=3, S=3, padding=1, bias=True).key()
        'fwd-float32-NCHW-N8-C64-H56-W56-K64-R3-S3-padding1x1-bias'
        """
        parts = [self.direction, self.dtype, self.layout, *(f"{name}{getattr(self, name)}" for name in EXTENTS)]
        for name in ("stride", "padding", "dilation"):
            pair = getattr(self, name)
            if name == "padding":
                pair = tuple(f"{a}" if a == b else f"{a}+{b}" for a, b in pair)
            text = "x".join(map(str, pair))
            if text != ("0x0" if name == "padding" else "1x1"):
                parts.append(name + text)
        parts += [f"groups{self.groups}"] if self.groups > 1 else []
        parts += [name for name in ("bias", "residual") if getattr(self, name)]
        parts += [self.activation] if self.activation else []
        if self.output_dtype != (self.accumulator.name if self.quantized else self.dtype):
            parts.append(f"output_{self.output_dtype}")
        return "-".join(parts)

    __str__ = key

    @classmethod
    def parse(cls, key: str) -> ConvLayer:
        """The layer a key describes; `ConvLayer.parse(layer.key()) == layer`.

        Parameters
        ----------
        key : str
            As `key` gives it; other spellings of the same layer are refused.

        Returns
        -------
        ConvLayer

        Raises
        ------
        LayerError
            When the text is not the key of a layer.
        """
        match = _KEY.fullmatch(key) if isinstance(key, str) and len(key) <= 400 else None
        if match is None:
            example = "fwd-float32-NCHW-N1-C64-H56-W56-K64-R3-S3-padding1x1"
            raise LayerError(f"{str(key)[:100]!r} is not a layer key: a key reads like {example}")
        found = {name: text for name, text in match.groupdict().items() if text is not None}
        values: dict[str, Any] = {name: int(found.pop(name)) for name in (*EXTENTS, "groups") if name in found}
        for name in ("stride", "dilation"):
            if name in found:
                values[name] = tuple(map(int, found.pop(name).split("x")))
        if "padding" in found:
            sides = [tuple(map(int, side.split("+"))) for side in found.pop("padding").split("x")]
            values["padding"] = tuple((side[0], side[-1]) for side in sides)
        values |= {name: found.pop(name, None) is not None for name in ("bias", "residual")}
        layer = cls(**values, **found)  # type: ignore[arg-type]
        if layer.key() != key:
            raise LayerError(f"{key!r} is not canonical: expected {layer.key()!r}")
        return layer

    def replace(self, **changes: Any) -> ConvLayer:
        """A copy with some fields changed, checked afresh.

        Parameters
        ----------
        **changes
            Arguments of `ConvLayer`, by name.

        Returns
        -------
        ConvLayer

        Raises
        ------
        LayerError
            When the changed layer is not a valid convolution.

        Examples
        --------
        >>> layer = ConvLayer(N=1, C=64, H=28, W=28, K=64, R=3, S=3, padding=1)
        >>> layer.replace(N=8, stride=2).y_shape
        (8, 64, 14, 14)
        """
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        if "dtype" in changes:  # the output's follows from it
            del kept["output_dtype"]
        return type(self)(**(kept | changes))

    def __repr__(self) -> str:
        return f"ConvLayer.parse({self.key()!r})"


_KEY = re.compile(
    r"(?P<direction>fwd|dgrad|wgrad)-(?P<dtype>[a-z]+\d+)-(?P<layout>NCHW|NHWC)"
    + "".join(rf"-{name}(?P<{name}>\d+)" for name in EXTENTS)
    + r"(-stride(?P<stride>\d+x\d+))?(-padding(?P<padding>\d+(\+\d+)?x\d+(\+\d+)?))?"
    + r"(-dilation(?P<dilation>\d+x\d+))?(-groups(?P<groups>\d+))?"
    + rf"(-(?P<bias>bias))?(-(?P<residual>residual))?(-(?P<activation>{activations.PATTERN}))?"
    + r"(-output_(?P<output_dtype>[a-z]+\d+))?"
)
