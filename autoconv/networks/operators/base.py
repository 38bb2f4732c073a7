"""The contract of an operator: what it makes of arrays of which shapes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.common.epilogue import activations
from autoconv.common.types import INTEGERS
from autoconv.errors import ConfigError
from autoconv.layer import Layout


@dataclass(frozen=True)
class TensorType:
    """Shape and type of an array.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        NumPy's name of the type.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def nbytes(self) -> int:
        """Bytes of such an array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def random_inputs(types: Mapping[str, TensorType]) -> dict[str, np.ndarray]:
    """Arrays to run a network on.

    Parameters
    ----------
    types : mapping of str to TensorType
        Of the inputs, by name.

    Returns
    -------
    dict of str to array
        Normally distributed numbers; bytes of their type's whole range; of wider integers, which may be places in a
        table, only 0 and 1.
    """
    rng = np.random.default_rng(0)
    return {name: _random(rng, found.shape, np.dtype(found.dtype)) for name, found in types.items()}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.name in INTEGERS:
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype.name, endpoint=True)
    if dtype.kind in "biu":
        return rng.integers(0, 2, shape).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    return rng.standard_normal(shape, wide).astype(dtype, copy=False)


class Operator(ABC):
    """What a node computes: one array from others. A frozen dataclass of printable constants."""

    @property
    def kind(self) -> str:
        """What messages and tables call it."""
        return type(self).__name__

    @abstractmethod
    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        """The type of the output.

        Parameters
        ----------
        inputs : sequence of TensorType

        Returns
        -------
        TensorType

        Raises
        ------
        ConfigError, LayerError
            When it cannot be applied to such arrays.
        """

    @abstractmethod
    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        """What NumPy makes of the arrays, in whatever precision they have: plain, slow, and what kernels are tested by.

        Parameters
        ----------
        *inputs : array
            Of types that `infer` takes, but for their precision.

        Returns
        -------
        array
        """

    def channels_last(self) -> Operator | None:
        """What computes the same of images in NHWC, to NHWC, where this one's are in NCHW.

        Returns
        -------
        Operator or None
            None where images have to be in NCHW: by what it means, or as there is no kernel for another layout.
        """
        return None

    def images(self, count: int) -> tuple[int, ...]:
        """Which of so many inputs are images, in the layout of the output; all, but of operators with filters."""
        return tuple(range(count))


@dataclass(frozen=True, kw_only=True)
class Product(Operator):
    """An operator whose sums of products may be followed by an epilogue: `activation(sums + bias + residual)`.

    Bias and residual are its last inputs, where it has them. The slopes of PReLU stand behind the bias in one array of
    one dimension, or in its place where there is none.

    Parameters
    ----------
    bias, residual : bool
    activation : str, optional
        As for `ConvLayer`.
    """

    bias: bool = False
    residual: bool = False
    activation: str | None = None

    @property
    def values_per_channel(self) -> int:
        """Of the input with bias and slopes; 0 where there is none."""
        return self.bias + activations.has_slopes(self.activation)

    def check_epilogue(self, inputs: Sequence[TensorType], channels: int, out: TensorType) -> TensorType:
        """The output's type, when the inputs after the first two are what the epilogue takes."""
        activations.canonical(self.activation)
        values = TensorType((self.values_per_channel * channels,), out.dtype)
        expected = [values] * (self.values_per_channel > 0) + [out] * self.residual
        if list(inputs[2:]) != expected:
            raise ConfigError(
                f"expected bias, slopes and residual {[*map(str, expected)]}, got {[*map(str, inputs[2:])]}"
            )
        return out

    def finish(self, sums: np.ndarray, rest: Sequence[np.ndarray], bias_shape: tuple[int, ...]) -> np.ndarray:
        """The sums after the epilogue, whose bias has a shape that broadcasts."""
        bias, slopes = activations.parted(rest[0] if self.values_per_channel else None, self.bias, self.activation)
        if bias is not None:
            sums = sums + bias.reshape(bias_shape)
        if self.residual:
            sums = sums + rest[-1]
        return np.asarray(
            activations.applied(self.activation, sums, None if slopes is None else slopes.reshape(bias_shape))
        )


def normalised_axis(axis: int, rank: int, name: str = "axis") -> int:
    """An axis counted from the front."""
    if not -rank <= axis < rank:
        raise ConfigError(f"{name}={axis}: expected {-rank} to {rank - 1}")
    return axis % rank


def checked_images(inputs: Sequence[TensorType]) -> None:
    """Refuse a first input that is no batch of images."""
    if len(inputs[0].shape) != 4:
        raise ConfigError(f"expected 4 dimensions, got {inputs[0].shape}")


def checked_pairs(**pairs: Any) -> None:
    """Refuse pairs (height, width) below 1, by name."""
    for name, pair in pairs.items():
        if min(pair) < 1:
            raise ConfigError(f"{name}={pair}: expected at least 1")


def moved_axis(axis: int) -> int:
    """Where a dimension of NCHW stands in NHWC."""
    return CHANNELS_LAST.index(axis)


def in_nchw(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """The extents N, C, H, W of a shape in a layout."""
    return tuple(shape if layout == "NCHW" else (shape[n] for n in CHANNELS_FIRST))


def in_layout(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in a layout of extents N, C, H, W."""
    return tuple(shape if layout == "NCHW" else (shape[n] for n in CHANNELS_LAST))
