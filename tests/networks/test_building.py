"""Building kernels of a network together with other processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autoconv.common import machine_code
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.correlation import pitched
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.run.building import Build, built
from autoconv.tuning.planner import plan
from autoconv.tuning.process import DeviceProcess

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
LAYER = ConvLayer(N=2, C=16, H=9, W=9, K=8, R=3, S=3, padding=1)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiler, "_programs", {})
    compiler._compiled.cache_clear()


def two_threads() -> CPU:
    return CPU(2, CPU.current().instruction_set)


def builds(device: CPU, count: int = 6) -> list[Build]:
    """Of layers, of which the last writes into a larger array."""
    layers = [LAYER.replace(K=8 * n) for n in range(1, count + 1)]
    made = [Build(plan(layer, "direct", device=device, build=False), layer) for layer in layers]
    return [*made[:-1], Build(made[-1].plan, pitched(layers[-1], None, 9 * 9 * 64))]


def test_others_compile_from_the_end_and_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device, started = two_threads(), list[tuple[DeviceProcess, dict[str, Any]]]()
    send = DeviceProcess.send
    monkeypatch.setattr(DeviceProcess, "send", lambda self, m: (started.append((self, m)), send(self, m))[1])
    made = builds(device)
    found = built(made, device, worth=0.0)
    ((helper, message),) = started
    assert not helper.alive
    assert [key for key, *_ in message["builds"]] == [build.layer.key() for build in made[:1:-1]]
    assert message["builds"][0][1:3] == (16 * 9 * 9, 9 * 9 * 64)
    assert [kernel.workspace_bytes for kernel in found] == [build().workspace_bytes for build in made]
    started.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/usr/bin/editor")  # which has Python built in
        built(made, device, worth=0.0)
    built(made, device, worth=1e9)
    built(made, CPU(1, device.instruction_set), worth=0.0)  # it has one processor
    assert started == []


def test_what_another_process_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, made = two_threads(), builds(two_threads())
    texts = [(*made[0].text[:3], "direct[TK=3]"), *(build.text for build in made)]  # of which the first cannot be
    helper = DeviceProcess(device, "autoconv.networks.run.building")
    helper.send({"machine": device.machine.text, "builds": texts})
    assert helper.receive(60) == {"built": len(texts)}
    helper.close()
    files = sorted(machine_code.folder().iterdir())

    def refuse(*args: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "_compiled", refuse)
    assert len(built(made, device)) == len(made)
    assert sorted(machine_code.folder().iterdir()) == files


def test_no_other_process_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DeviceProcess, message: object) -> None:
        raise PlanError("no more processes")

    monkeypatch.setattr(DeviceProcess, "send", refuse)
    device = two_threads()
    assert len(built(builds(device), device, worth=0.0)) == 6
