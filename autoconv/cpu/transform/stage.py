"""A stage of the pipeline: what all that write functions for one correlation know."""

from __future__ import annotations

from typing import Generic, TypeVar

from autoconv.cpu.codegen.ir import DTYPES, Function, Module, Type, widened
from autoconv.cpu.transform.geometry import Tiling
from autoconv.layer import ConvLayer

T = TypeVar("T", bound=Tiling)


class Stage(Generic[T]):
    """Writes functions of one correlation; their names end in its number."""

    def __init__(self, m: Module, layer: ConvLayer, tiling: T, number: int) -> None:
        self.m, self.layer, self.tiling, self.number = m, layer, tiling, number
        self.stored = DTYPES[layer.dtype]
        self.real = widened(self.stored)
        self.channels_last = layer.layout == "NHWC"

    def function(self, name: str, *types: Type) -> Function:
        """An internal function of this correlation."""
        return self.m.function(f"{name}{self.number}", *types, internal=True)
