"""Every instruction set that kernels are written for on this architecture, on any processor of it.

Where this one lacks a set, its kernels are compiled for what there is, and LLVM splits their vectors: what they
compute is checked everywhere. The machine code that they are elsewhere is checked by `--avx512`, see bochs.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from autoconv.cpu.device import CPU, LEVELS, host_level
from autoconv.cpu.device import INSTRUCTION_SETS as EVERYWHERE
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.threads import count_threads

__all__ = ["INSTRUCTION_SETS", "MACHINES", "device_with", "machine_named", "modelled", "tile_device"]

INSTRUCTION_SETS = tuple(name for name in EVERYWHERE if name in LEVELS)
FOLDER = Path(__file__).parent / "cpu" / "machines"
MACHINES = sorted(path.stem for path in FOLDER.glob("*.json"))


def machine_named(name: str) -> Machine:
    """One of the models in `cpu/machines`."""
    return Machine.from_json(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def modelled(instruction_set: str, threads: int, caches: tuple[int, int, int] | None = None) -> Machine:
    """One of the models in `cpu/machines`, of so many threads, its vectors those of an instruction set."""
    machine = machine_named("epyc-zen3")
    peaks = {instruction_set: machine.peaks["avx2"]}
    return dataclasses.replace(machine, threads=threads, peaks=peaks, caches=caches or machine.caches)


def device_with(instruction_set: str, threads: int | None = None, caches: tuple[int, int, int] | None = None) -> CPU:
    """This processor as one with an instruction set, which it may lack; the rest of it is the same everywhere."""
    number = threads or count_threads().threads
    return CPU(number, instruction_set, model=modelled(instruction_set, number, caches).text)


def tile_device(instruction_set: str | None = None) -> CPU:
    """This processor with the matrix unit that it has, or an emulated one, as with other vectors than its own."""
    hardware = host_level() == "amx" and instruction_set in (None, "avx512")
    chosen = instruction_set or ("avx512" if hardware else "avx2")
    return CPU(2, chosen, matrix_unit="amx" if hardware else "emulated", model=modelled(chosen, 2).text)
