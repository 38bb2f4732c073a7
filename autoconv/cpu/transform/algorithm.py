"""What the algorithms that transform tiles have in common: sizes of memory and predictions, of how a layer is cut."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import Emitter, GeneratedAlgorithm
from autoconv.cpu.common.estimate import OVERLAP, operands_once
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.transform.estimate import Counts, Forecast, forecast
from autoconv.cpu.transform.geometry import Tiling
from autoconv.layer import ConvLayer

T = TypeVar("T", bound=Tiling)


class TransformAlgorithm(GeneratedAlgorithm, Generic[T]):
    """A family that runs the pipeline of transforms on every correlation of a layer."""

    emitter: ClassVar[Emitter]  # of a layer by its tilings

    @abstractmethod
    def tilings(self, layer: ConvLayer, device: CPU, params: Params) -> tuple[T, ...]:
        """How each correlation of a layer is cut."""

    @abstractmethod
    def counts(self, tiling: T, machine: Machine) -> Counts:
        """What there is to compute."""

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return max(tiling.workspace_bytes() for tiling in self.tilings(layer, device, params))

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return layer.accumulator.itemsize * sum(tiling.packed_size for tiling in self.tilings(layer, device, params))

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """What is computed, and beside it how the image comes and goes: that weighs where there are few channels."""
        moved = operands_once(layer, device.machine)
        return self._forecast(layer, device, params).seconds + (1 - OVERLAP) * moved

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(self.emitter, device.instruction_set, layer, self.tilings(layer, device, params))

    def party(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return self._forecast(layer, device, params).party

    def _forecast(self, layer: ConvLayer, device: CPU, params: Params) -> Forecast:
        cut = self.tilings(layer, device, params)
        return forecast([(tiling, self.counts(tiling, device.machine)) for tiling in cut], device.machine)
