"""Convolutions that follow each other as one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoconv.layer import ConvLayer
from autoconv.networks.operators.base import Operator, TensorType
from autoconv.networks.operators.convolution import Conv


@dataclass(frozen=True)
class FusedConv(Operator):
    """Convolutions each of which takes what the one before computes; that is no array of the graph.

    Inputs are the image, then of each convolution in order its other inputs.

    Parameters
    ----------
    convolutions : tuple of Conv
    """

    convolutions: tuple[Conv, ...]

    def layers(self, inputs: Sequence[TensorType]) -> list[ConvLayer]:
        """The layers that compute them one by one."""
        found, image, rest = [], inputs[0], inputs[1:]
        for convolution in self.convolutions:
            here = [image, *rest[: _others(convolution)]]
            found.append(convolution.layer(here))
            image, rest = convolution.infer(here), rest[_others(convolution) :]
        return found

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        last = self.layers(inputs)[-1]
        return TensorType(last.y_shape, last.dtype)

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        image, rest = inputs[0], inputs[1:]
        for convolution in self.convolutions:
            image = convolution.evaluate(image, *rest[: _others(convolution)])
            rest = rest[_others(convolution) :]
        return image

    def others(self, inputs: Sequence[str]) -> list[tuple[str, ...]]:
        """Of each convolution the names of its inputs besides the image."""
        found, rest = [], tuple(inputs[1:])
        for convolution in self.convolutions:
            found.append(rest[: _others(convolution)])
            rest = rest[_others(convolution) :]
        return found


def _others(convolution: Conv) -> int:
    """How many inputs a convolution has besides its image."""
    return 1 + (convolution.values_per_channel > 0) + convolution.residual
