"""What the algorithms with generated kernels share: these kernels, how they are called, and by how many threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.common.epilogue import activations, expressions
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Module
from autoconv.cpu.common.estimate import meeting
from autoconv.cpu.common.functions import FLOAT32_SERIES
from autoconv.cpu.device import CPU
from autoconv.cpu.pool import Entry
from autoconv.layer import ConvLayer


def party(layer: ConvLayer, device: CPU) -> int:
    """How many threads take part in a layer: as many as it has work for, as each of them has to come and to be awaited.

    With t of T threads, the work takes 1/t of the time that one thread takes, and meeting (t - 1) / (T - 1) of what it
    takes all: their sum is least at some t. The work is the direct sum, or moving the operands if that takes longer.

    Parameters
    ----------
    layer : ConvLayer
    device : CPU

    Returns
    -------
    int
        From 1 to the device's threads.
    """
    machine, threads = device.machine, device.threads
    if threads == 1 or machine.barrier is None:
        return threads
    alone = threads * max(layer.flops / device.peak_flops(layer.dtype), layer.bytes / machine.memory)
    return min(range(1, threads + 1), key=lambda t: alone / t + meeting(machine, t))


def imprecise(layer: ConvLayer) -> list[str]:
    """The reason against an activation in float64 for which there are only the series of float32."""
    if layer.dtype != "float64" or layer.activation is None:
        return []
    series = set(expressions.functions(activations.expression(layer.activation))) & FLOAT32_SERIES
    return [f"dtype: expected float32 sums under {', '.join(sorted(series))}, got float64"] if series else []


Emitter = Callable[..., Module]  # of the text of a kernel; its module says what that is made of
A, B, OUT, BIAS, RESIDUAL, WORKSPACE = range(6)  # the operands of a kernel's `run`, in their order


@dataclass(frozen=True)
class NativeCall:
    """The function `run` of a program as a part of a kernel.

    Parameters
    ----------
    program : Program
    takes : sequence of (int, int) or None
        For each of its own operands, which of the kernel's it is, and from which byte on; None for one it lacks.
    party : int, optional
        How many threads take part at most; all of the device unless it is given.
    """

    program: compiler.Program
    takes: Sequence[tuple[int, int] | None]
    party: int | None = None


class NativeKernel(Kernel):
    """A kernel whose runs are runs of programs, one after the other, so that those of many can be a single call."""

    @abstractmethod
    def calls(self) -> list[NativeCall]:
        """The programs of one run, in their order."""


class GeneratedKernel(NativeKernel):
    """A program as a kernel: its functions `run`, and `pack` where the filters are packed.

    `pack` sees the filters as operand a and the packed buffer as out.
    """

    def __init__(
        self,
        program: compiler.Program,
        threads: int,
        workspace_bytes: int = 0,
        packed_bytes: int = 0,
        party: int | None = None,
    ) -> None:
        self._program, self._party = program, party
        self.workspace_bytes, self.packed_bytes = workspace_bytes, packed_bytes
        self._run = Entry(program, "run", threads, party)
        self._pack = Entry(program, "pack", threads) if packed_bytes else None

    def pack(self, w: Array, packed: Array) -> None:
        if self._pack is None:
            super().pack(w, packed)
        else:
            self._pack(w, None, packed)

    def keep_denormals(self) -> None:
        for entry in (self._run, self._pack):
            if entry is not None:
                entry.keep_denormals()

    def calls(self) -> list[NativeCall]:
        return [NativeCall(self._program, [(n, 0) for n in range(WORKSPACE + 1)], self._party)]

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        self._run(a, b, out, bias, residual, workspace)


class GeneratedAlgorithm(Algorithm[CPU]):
    """A family whose kernels are compiled here."""

    epilogue = ("fwd", "dgrad")
    activations = activations.NAMES
    pool = "autoconv"
    searched = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        return super().unsupported(layer) + imprecise(layer)

    def why_not(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        unavailable = pool.unavailable()
        return ([] if unavailable is None else [unavailable]) + super().why_not(layer, device, params)

    @abstractmethod
    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        """The functions `run`, and `pack` where filters are packed."""

    def party(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        """How many of the device's threads take part."""
        return party(layer, device)

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        while True:  # memory and code are of one model of the machine, which another thread may replace at any moment
            machine = device.machine
            sizes = self.workspace_bytes(layer, device, params), self.packed_bytes(layer, device, params)
            program, party = self.program(layer, device, params), self.party(layer, device, params)
            if device.machine == machine:
                return GeneratedKernel(program, device.threads, *sizes, party)
