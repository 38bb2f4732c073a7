"""Machines that were not measured, and little effort for one that is."""

from __future__ import annotations

import dataclasses

from autoconv.cpu.machine import measure
from autoconv.cpu.machine.curve import Curve
from autoconv.cpu.machine.model import Machine

__all__ = ["CURVED", "MACHINE", "SMALL"]

SMALL = dataclasses.replace(measure.ROUGH, largest=1 << 20, farthest=1 << 18, seconds=1e-5)
MACHINE = Machine(
    threads=2,
    when="2026-11-22T12:00:00+00:00",
    thorough=True,
    busy=0.0,
    peaks={"avx2": {"float32": 2e11, "float64": 1e11}},
    read_one=Curve(((1 << 14, 2e11), (1 << 20, 8e10), (1 << 26, 2e10))),
    read=Curve(((1 << 15, 4e11), (1 << 21, 1.6e11), (1 << 26, 4e10))),
    write=Curve(((1 << 15, 2e11), (1 << 26, 2e10))),
    stream=None,
    chase=None,
    jumps=None,
    handed=None,
    transform=1e9,
    call=1e-6,
    barrier=5e-7,
    wake=1e-4,
    caches=(1 << 15, 1 << 19, 1 << 24),
)
CURVED = dataclasses.replace(
    MACHINE,
    stream=MACHINE.write,
    chase=Curve(((1 << 14, 6e8), (1 << 20, 7e7), (1 << 26, 7e6))),
    jumps=Curve(((1 << 15, 1e10), (1 << 21, 1.4e9), (1 << 27, 1.4e8))),
    handed=Curve(((1 << 15, 1e10), (1 << 21, 2.5e10), (1 << 27, 2e10))),
)
