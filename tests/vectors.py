"""Every instruction set that kernels are written for, on any processor.

Where this one lacks a set, its kernels are compiled for what there is, and LLVM splits their vectors: what they
compute is checked everywhere. The machine code that they are elsewhere is checked by `--avx512`, see bochs.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from autoconv.cpu.device import CPU, INSTRUCTION_SETS
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.threads import count_threads

__all__ = ["INSTRUCTION_SETS", "MACHINES", "device_with", "machine_named"]

FOLDER = Path(__file__).parent / "cpu" / "machines"
MACHINES = sorted(path.stem for path in FOLDER.glob("*.json"))


def machine_named(name: str) -> Machine:
    """One of the models in `cpu/machines`."""
    return Machine.from_json(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def device_with(instruction_set: str, threads: int | None = None, caches: tuple[int, int, int] | None = None) -> CPU:
    """This processor as one with an instruction set, which it may lack; the rest of it is the same everywhere."""
    machine = machine_named("epyc-zen3")
    changes = {
        "threads": threads or count_threads().threads,
        "peaks": {instruction_set: machine.peaks["avx2"]},
        "caches": caches or machine.caches,
    }
    return CPU(changes["threads"], instruction_set, model=dataclasses.replace(machine, **changes).text)
