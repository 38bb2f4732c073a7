"""Every instruction set that kernels are written for, on any processor.

Where this one lacks a set, its kernels are compiled for what there is, and LLVM splits their vectors: what they
compute is checked everywhere. The machine code that they are elsewhere is checked by `--avx512`, see bochs.py.
"""

from __future__ import annotations

from autoconv.cpu.device import CPU, INSTRUCTION_SETS
from autoconv.cpu.threads import count_threads

__all__ = ["INSTRUCTION_SETS", "device_with"]


def device_with(instruction_set: str, threads: int | None = None) -> CPU:
    """This processor as one with an instruction set, which it may lack."""
    return CPU(threads=threads or count_threads().threads, instruction_set=instruction_set)
