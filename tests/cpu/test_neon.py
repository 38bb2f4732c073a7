"""Kernels as they are written for ARM's vectors, on any processor: 16 bytes, 32 registers, and multiply-adds."""

from __future__ import annotations

from pathlib import Path

import pytest
from guards import check_guarded
from layers import edge, operands
from vectors import device_with

from autoconv import registry
from autoconv.cpu import device as module
from autoconv.cpu import hardware, pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.correlation import correlations
from autoconv.cpu.common.grid import register_tiles
from autoconv.cpu.device import CPU
from autoconv.cpu.winograd.geometry import WinogradTiling
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
NEON = device_with("neon")
FAMILIES = [a for a in registry.algorithms(NEON) if a.vendor is None and not a.name.startswith("numpy.")]
LARGE = (  # for families that take no small ones
    ConvLayer(N=2, C=65, H=9, W=10, K=40, R=3, S=3, padding=1),
    ConvLayer(N=1, C=256, H=16, W=16, K=256, R=1, S=1),
    ConvLayer(N=1, C=65, H=9, W=10, K=40, R=3, S=3, padding=1, direction="wgrad"),
    ConvLayer(N=1, C=6, H=8, W=8, K=64, R=2, S=2, stride=2, direction="dgrad"),
)
GRAVITON = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

processor\t: 1
"""


def test_every_family_computes_with_them() -> None:
    small = [edge("remainders", dtype="float16"), edge("strided", direction="dgrad"), edge("depthwise"), edge("stem")]
    drawn = [*small, edge("depthwise", direction="wgrad"), edge("depthwise strided", direction="dgrad"), *LARGE]
    idle = {a.name for a in FAMILIES if not sum(check_guarded(a, layer, NEON, operands(layer)) for layer in drawn)}
    assert all("matrix" in name or "int8" in name for name in idle), idle


def test_a_processor_of_arm_is_known_by_its_registers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    hardware.CPUINFO.write_text(GRAVITON, encoding="utf-8")
    monkeypatch.setattr(compiler, "host_name", lambda: "neoverse-n1")
    assert hardware.identity() == ("neoverse-n1", "0x41", "8", "0xd0c", "r3p1")
    assert CPU(2, "neon").key.startswith("cpu-0x41-8-0xd0c-r3p1-neon-L1:")
    monkeypatch.setattr(compiler, "host_name", lambda: "generic")
    assert hardware.identity().name.endswith("0x41 0xd0c"), "LLVM does not know every one"


def test_a_processor_that_no_file_describes_is_known_as_llvm_knows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(compiler, "host_name", lambda: "apple-m1")
    found = hardware.identity()
    assert (found.name, found.model) == ("apple-m1", "apple-m1")


def test_each_architecture_offers_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEVELS", ("neon", "generic"))
    monkeypatch.setattr(module, "X86", False)
    assert module.host_instruction_set.__wrapped__() == "neon"
    with pytest.raises(PlanError, match="instruction_set='avx2': expected neon or generic"):
        CPU.current(instruction_set="avx2")
    monkeypatch.setattr(compiler, "X86", False)
    for name in ("avx512", "avx2"):  # of which LLVM would end the process
        with pytest.raises(PlanError, match=f"instruction_set='{name}': expected that of this processor"):
            compiler._features.__wrapped__(name)


def test_its_grids_are_those_of_32_registers() -> None:
    assert register_tiles("neon") == register_tiles("avx512") != register_tiles("generic")
    (correlation,) = correlations(LARGE[0])
    tilings = {name: WinogradTiling(correlation, name, 4, 2, (4, 4), 1, 0) for name in ("neon", "avx512", "generic")}
    assert {name: (t.lanes, t.most_tiles) for name, t in tilings.items()} == {
        "neon": (4, 14),
        "avx512": (16, 14),
        "generic": (4, 6),
    }
