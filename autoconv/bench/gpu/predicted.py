"""What our kernels should do on GPUs that nobody here has: the estimates, with the figures of data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoconv.algorithm import Algorithm, Candidate
from autoconv.bench.gpu.cases import NominalGPU, runnable
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class DatasheetGPU(NominalGPU):
    """A GPU as NVIDIA describes it: the clock is the highest, in hertz, the bandwidth in bytes per second."""

    model: str = "nominal"
    multiprocessors: int = 4
    l2_bytes: int = 1 << 20
    clock_hz: float = 1e9
    memory_bandwidth: float = 1e11

    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | {
            "name": self.model,
            "multiprocessors": self.multiprocessors,
            "l2_bytes": self.l2_bytes,
            "clock_hz": self.clock_hz,
            "bandwidth": self.memory_bandwidth,
        }


def _gpu(
    capability: int, model: str, multiprocessors: int, l2_mib: int, clock: float, bandwidth: float
) -> DatasheetGPU:
    return DatasheetGPU(
        capability=capability,
        model=model,
        multiprocessors=multiprocessors,
        l2_bytes=l2_mib << 20,
        clock_hz=clock,
        memory_bandwidth=bandwidth,
    )


GPUS = (
    _gpu(90, "H200", 132, 50, 1.98e9, 4.8e12),
    _gpu(80, "A100", 108, 40, 1.41e9, 2.039e12),
    _gpu(89, "RTX 4090", 128, 72, 2.52e9, 1.008e12),
)


def predictions(
    layer: ConvLayer, device: NominalGPU, algorithms: Sequence[Algorithm[Any]]
) -> list[tuple[float, Candidate]]:
    """Every candidate that can run and its seconds, the quickest first, equal ones in the order of the algorithms.

    None that rounds operands to TF32.
    """
    found = [
        (algorithm.estimate(layer, device, params), Candidate(algorithm.name, tuple(params.items())))
        for algorithm in algorithms
        if not algorithm.tf32
        for params in runnable(algorithm, layer, device)
    ]
    return sorted(found, key=lambda pair: pair[0])
