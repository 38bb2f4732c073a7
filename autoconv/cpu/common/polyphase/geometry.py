"""The geometry of polyphase components: what a strided axis falls into, and the layer of unit stride that is left.

Inputs whose padded position has the same residue modulo the stride see the same taps, and neighbours among them
see neighbouring outputs. With a channel for every residue, the gradient of the input is a convolution of dy, whose
filters are the layer's deinterleaved by residue and rotated by 180 degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoconv.cpu.common.correlation import pitched, pitches
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class PolyphaseAxis:
    """One axis: output j of component b is input `stride * (first + j) + b - pad`, and its tap t is `b + stride * t`.

    `size` inputs, `extent` taps of the layer's filter, `pad` inputs of padding in front, `outputs` of the layer.
    """

    size: int
    extent: int
    stride: int
    pad: int
    outputs: int

    @property
    def taps(self) -> int:
        """Of a component, the shorter ones filled up with zeros."""
        return -(-self.extent // self.stride)

    @property
    def first(self) -> int:
        """The first j of an input."""
        return self.pad // self.stride

    @property
    def count(self) -> int:
        """Outputs of a component, some of which may lie outside."""
        return (self.pad + self.size - 1) // self.stride - self.first + 1

    @property
    def padding(self) -> tuple[int, int]:
        """Of dy; negative where there are outputs that see no input."""
        before = self.taps - 1 - self.first
        return before, self.count - 1 + self.taps - self.outputs - before


def polyphase_axes(layer: ConvLayer) -> tuple[PolyphaseAxis, PolyphaseAxis]:
    """Rows and columns."""
    return (
        PolyphaseAxis(layer.H, layer.R, layer.stride[0], layer.padding[0][0], layer.P),
        PolyphaseAxis(layer.W, layer.S, layer.stride[1], layer.padding[1][0], layer.Q),
    )


def unit_stride_layer(layer: ConvLayer) -> ConvLayer:
    """The convolution of dy with a channel for each component: of a group, all channels of one after the other's.

    It has no epilogue, which dx gets when it is put together.
    """
    rows, columns = polyphase_axes(layer)
    found = pitched(layer).replace(
        direction="fwd",
        C=layer.K,
        H=layer.P,
        W=layer.Q,
        K=layer.C * rows.stride * columns.stride,
        R=rows.taps,
        S=columns.taps,
        stride=(1, 1),
        padding=(rows.padding, columns.padding),
        bias=False,
        residual=False,
        activation=None,
    )
    return pitched(found, pitches(layer)[0])
