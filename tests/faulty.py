"""A CPU with candidates that go wrong in planned ways, for the tests of verification and planning."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoconv import registry
from autoconv.algorithm import Algorithm, Array, Candidate, Kernel, Params
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.records.schema import Facts
from autoconv.tuning import process as processes
from autoconv.tuning.measurement import Measurement

SIZE = 64  # bytes of workspace


def beyond(array: Array) -> None:
    """Write one float right behind the end of an array."""
    ctypes.c_float.from_address(array.ctypes.data + array.nbytes).value = 1.0


def wrong_one(out: Array) -> None:
    flat = out.reshape(-1)
    flat[flat.size // 3] += 0.01


FAULTS: dict[str, Callable[[FaultyKernel, Array, Array, Array], None]] = {
    "none": lambda kernel, a, out, workspace: None,
    "overrun": lambda kernel, a, out, workspace: beyond(out),
    "scribble": lambda kernel, a, out, workspace: beyond(workspace),
    "input": lambda kernel, a, out, workspace: a.__setitem__((0, 0, 0, 0), 7.0),
    "unwritten": lambda kernel, a, out, workspace: out.reshape(-1).__setitem__(-1, np.nan),
    "wrong": lambda kernel, a, out, workspace: wrong_one(out),
    "unsteady": lambda kernel, a, out, workspace: out.__imul__(np.float32(1 + 1e-7 * (kernel.calls % 2))),
    "raises": lambda kernel, a, out, workspace: (_ for _ in ()).throw(ValueError("no such thing")),
    "dies": lambda kernel, a, out, workspace: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda kernel, a, out, workspace: os.kill(os.getpid(), signal.SIGKILL),
    "dies_later": lambda kernel, a, out, workspace: kernel.calls > 2 and os.kill(os.getpid(), signal.SIGABRT),
    "hangs": lambda kernel, a, out, workspace: time.sleep(1000),
    "slow": lambda kernel, a, out, workspace: time.sleep(0.02),
    "exits": lambda kernel, a, out, workspace: os._exit(3),
}


class FaultyKernel(Kernel):
    def __init__(self, layer: ConvLayer, device: Device, fault: str, size: int) -> None:
        self._right = NumpyDirect().build(layer, device, {})
        self._fault, self.workspace_bytes, self.calls = FAULTS[fault], size, 0

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        self.calls += 1
        self._right.run(a, b, out, bias, residual, workspace)
        self._fault(self, a, out, workspace)


class Faulty(Algorithm):
    """Right but for one fault; `size` is the workspace it asks for."""

    def __init__(self, fault: str, size: int = SIZE, version: str = "1", seconds: float = 1e-6) -> None:
        self.name, self._fault, self._size, self._version = f"faulty.{fault}", fault, size, version  # type: ignore[misc]
        self._seconds = seconds

    @property
    def version(self) -> str:
        return self._version

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        return ({},)

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        return ["it is never for wide images"] if layer.W > 500 else []

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        return self._size

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        return self._seconds

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        return FaultyKernel(layer, device, self._fault, self._size)


@dataclass(frozen=True)
class FaultyCPU(CPU):
    """A CPU with NumPy's direct algorithm and the named faults, and nothing else."""

    faults: tuple[str, ...] = ()
    version: str = "1"

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))  # a list, when it comes through JSON

    @classmethod
    def having(cls, *faults: str, version: str = "1") -> FaultyCPU:
        cpu = CPU.current()
        return cls(cpu.threads, cpu.instruction_set, faults=faults, version=version)


@dataclass(frozen=True)
class EmptyCPU(CPU):
    """A CPU that has no algorithm at all, so nothing to verify against either."""


@registry.algorithms.register
def _(device: FaultyCPU) -> tuple[Algorithm, ...]:
    return (NumpyDirect(), *(Faulty(fault, version=device.version) for fault in device.faults))


@registry.algorithms.register
def _(device: EmptyCPU) -> tuple[Algorithm, ...]:
    return ()


def patient_but_with_hangs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have a worker's lines awaited without a clock, by which a busy machine is as one that hangs; but for hangs.

    Returns the seconds for which each line would have been awaited.
    """
    waits = []

    class Lines(queue.Queue[str | None]):
        last: str | None = None

        def get(self, block: bool = True, timeout: float | None = None) -> str | None:
            assert timeout is not None
            waits.append(timeout)
            if "faulty.hangs" in (self.last or ""):
                raise queue.Empty
            self.last = super().get()
            return self.last

    monkeypatch.setattr(processes, "queue", SimpleNamespace(Queue=Lines, Empty=queue.Empty))
    return waits


def pretended(facts: Callable[[Candidate], Facts], raced: list[list[str]] | None = None) -> Callable[..., Any]:
    """In place of `Measurement`: what is said of every candidate, and which ones were raced together."""

    class Pretended:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.found: dict[Candidate, Facts] = {}

        def enter(self, candidates: list[Candidate]) -> dict[Candidate, Facts]:
            entered = {candidate: facts(candidate) for candidate in candidates}
            self.found |= entered
            return entered

        def finish(self) -> dict[Candidate, Facts]:
            if raced is not None:
                raced.append(list(map(str, self.found)))
            return self.found

    return Pretended


def measure(layer: ConvLayer, device: Device, candidates: Sequence[Candidate]) -> dict[Candidate, Facts]:
    """The facts of candidates that are all measured at once."""
    measurement = Measurement(layer, device)
    measurement.enter(candidates)
    return measurement.finish()
