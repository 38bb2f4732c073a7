"""Kernels with a fault planted in their text: what the emulator, or a wrong answer, must give away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simt.cases import checker
from simt.emulator import Emulated, EmulationError, launcher, sanitized

from autoconv.algorithm import Params
from autoconv.bench.gpu.cases import SCHEDULES
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.layer import ConvLayer

Fault = tuple[str, str]  # what is right, and what stands in its place


@dataclass(frozen=True)
class Planted(Emulated):
    """An emulated GPU whose kernels have a fault."""

    capability: int = 90
    fault: Fault = ("", "")

    def load(self, unit: Unit) -> Callable[..., None]:
        right, wrong = self.fault
        if unit.text.count(right) > 1:  # no assertion, which would count as caught
            raise ValueError(f"{right!r} is more than one place in {unit.function}")
        text = unit.text.replace(right, wrong)
        if self.sanitizer:
            return sanitized(unit, self.sanitizer, self.schedule, text)
        return launcher(unit, self.flags, self.schedule, text)


def caught(fault: Fault, algorithm: CudaAlgorithm, layer: ConvLayer, params: Params) -> bool:
    """Whether some schedule brings a fault to light.

    Raises
    ------
    ValueError
        When the kernels' texts have no such place, or several.
    """
    if not any(fault[0] in unit.text for unit in algorithm.units(layer, params)):
        raise ValueError(f"{fault[0]!r} is not a place in the kernels of {algorithm.name}")
    check = checker(algorithm, layer, params)
    for schedule in range(SCHEDULES):
        try:
            check(Planted(fault=fault, schedule=schedule))
        except (AssertionError, EmulationError):
            return True
    return False
