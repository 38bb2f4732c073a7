"""What a baseline is: a library to measure against, and how it is given a layer.

Each is called as its own users call it, at its default settings but for the type and the thread count, and gets its
tensors in its own format before the clock starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.common.epilogue import activations
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.vendors.base import installed, release


def given(layer: ConvLayer) -> bool:
    """Whether baselines are given a layer with such an activation."""
    return layer.activation in (None, "relu")


@dataclass(frozen=True)
class Problem:
    """One layer with operands in its type: normal numbers, filters scaled so that the output's are about as large."""

    layer: ConvLayer
    a: Array
    b: Array
    bias: Array | None
    residual: Array | None
    slope: Array | None = None

    @classmethod
    def draw(cls, layer: ConvLayer, device: CPU, seed: int = 0) -> Problem:
        """Operands from a seed."""
        generator = np.random.default_rng(seed)

        def normal(shape: tuple[int, ...], scale: float = 1.0) -> Array:
            array = device.empty(shape, np.float32)
            generator.standard_normal(dtype=np.float32, out=array)
            array *= np.float32(scale)
            if layer.dtype == "float32":
                return array
            narrow = device.empty(shape, layer.numpy_dtype)
            narrow[...] = array
            return narrow

        terms = math.prod(layer.w_shape[1:]) if layer.direction == "fwd" else layer.macs / math.prod(layer.output_shape)
        a, b = layer.input_shapes
        images, filters = normal(a), normal(b, 1 / math.sqrt(terms))
        values = normal((layer.channel_values,)) if layer.channel_values else None
        bias, slope = activations.parted(values, layer.bias, layer.activation)
        return cls(layer, images, filters, bias, normal(layer.output_shape) if layer.residual else None, slope)

    def channels_first(self, device: CPU) -> Problem:
        """The same in NCHW, where it is in NHWC: what libraries are given."""
        if self.layer.layout == "NCHW":
            return self

        def turned(array: Array) -> Array:
            first = array.transpose(CHANNELS_FIRST)
            if first.flags.c_contiguous:  # single pixels, and filters of one tap, lie alike in both
                return array.reshape(first.shape)
            found = device.empty(first.shape, array.dtype)
            found[...] = first
            return found

        residual = None if self.residual is None else turned(self.residual)
        layer = self.layer.replace(layout="NCHW")
        return Problem(layer, turned(self.a), turned(self.b), self.bias, residual, self.slope)

    def operands(self, name: str, constant: bool = True) -> tuple[dict[str, Array], dict[str, Array]]:
        """As `onnx_model` calls them: the inputs of the model, and its constants, the filters among them or not."""
        inputs, constants = {"x": self.a, "residual": self.residual}, {"bias": self.bias}
        (constants if constant else inputs)["w"] = self.b
        first, second = (
            {f"{name}.{part}": array for part, array in found.items() if array is not None}
            for found in (inputs, constants)
        )
        return first, second


class Prepared(NamedTuple):
    """A layer as a contestant runs it, and how to read what a run returns.

    Parameters
    ----------
    run : callable
        One run. What it returns is in the contestant's own format.
    read : callable
        Makes a NumPy array in the layer's layout of that, outside of the clock.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Array] = lambda y: y


@dataclass(frozen=True)
class Library:
    """A library to measure against.

    Parameters
    ----------
    name : str
        What options and results call it.
    label : str
        What people call it.
    packages : tuple of str
        What has to be installed; the first is the library.
    """

    name: str
    label: str
    packages: tuple[str, ...]

    @property
    def version(self) -> str:
        """Of the library."""
        return release(self.packages[0])

    def missing(self) -> list[str]:
        """The packages it lacks."""
        return [package for package in self.packages if not installed(package)]


@dataclass(frozen=True)
class Baseline(Library):
    """A library's convolution.

    Parameters
    ----------
    prepared : callable
        As `prepare`, for what any of them is given.
    directions : tuple of str
        What it can compute.
    varying : bool
        Whether it takes filters that are not constant.
    tensors : str
        The format of its tensors, where that is not NCHW.
    reuses : bool
        Whether it can be given an output array.
    dtypes : tuple of str
        In which types it computes.
    """

    prepared: Callable[[Problem, CPU, bool, bool], Prepared]
    directions: tuple[str, ...] = ("fwd",)
    varying: bool = True
    tensors: str = ""
    reuses: bool = False
    dtypes: tuple[str, ...] = ("float32",)

    def prepare(self, problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
        """A layer as the library runs it.

        Parameters
        ----------
        problem : Problem
        device : CPU
        constant : bool
            Whether filters may be transformed beforehand.
        fresh : bool
            Whether the output is a new array every time.

        Returns
        -------
        Prepared

        Raises
        ------
        PlanError
            Where the library cannot compute the layer.
        """
        layer = problem.layer
        if not given(layer):
            raise PlanError(f"activation={layer.activation!r}: baselines are given None or 'relu'")
        if layer.dtype not in self.dtypes:
            raise PlanError(f"dtype={layer.dtype!r}: {self.label} is given {', '.join(self.dtypes)}")
        if layer.direction not in self.directions:
            raise PlanError(f"direction={layer.direction!r}: {self.label} is given {', '.join(self.directions)}")
        if layer.direction != "fwd" and layer.has_epilogue:
            raise PlanError(f"direction={layer.direction!r}: baselines are given no bias, residual or activation")
        prepared = self.prepared(problem.channels_first(device), device, constant, fresh)
        if layer.layout == "NCHW":
            return prepared
        return Prepared(prepared.run, lambda y: prepared.read(y).transpose(CHANNELS_LAST))

    def takes(self, direction: str, constant: bool, dtype: str = "float32") -> bool:
        """Whether it can be compared in this direction and type, and with filters that are constant or not."""
        return direction in self.directions and (constant or self.varying) and dtype in self.dtypes
