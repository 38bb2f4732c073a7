"""The one command for the hour with hardware, from end to end on the emulated device."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from bench_gpus import LAYER, WANTED, Narrow, short, some
from simt.emulator import MISSING

from autoconv import registry
from autoconv.algorithm import Algorithm, Kernel, Params
from autoconv.bench import gpu as bench
from autoconv.bench.gpu import CACHES, RESULTS, Helper, read
from autoconv.bench.gpu.agenda import CEILINGS
from autoconv.bench.gpu.helper import OURS
from autoconv.bench.gpu.report import markdown
from autoconv.cli import bench as command
from autoconv.cli import main, options
from autoconv.cuda.direct.direct import Direct
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.registry import algorithms
from autoconv.tuning.planner import plan
from autoconv.tuning.process import OVERRAN

__all__ = ["short"]  # a fixture

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


class Losing(Narrow):
    """A GPU that a kernel takes from the process it runs in."""

    def lost(self) -> str:
        sign = Path(os.environ["LOST"])
        return "cudaErrorIllegalAddress" if sign.exists() and sign.read_text() == str(os.getpid()) else ""


class Strays(Direct):
    name = "strays"
    version = "of this test"  # type: ignore[assignment]  # it is no part of the package

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        Path(os.environ["LOST"]).write_text(str(os.getpid()))
        raise RuntimeError("an illegal memory access was encountered")


@registry.algorithms.register
def _(device: Losing) -> tuple[Algorithm, ...]:
    return (Direct(), Strays())


def test_every_phase_runs_is_kept_and_is_not_done_twice(short: Any, tmp_path: Path) -> None:
    device, phases = Narrow(capability=80), ("check", "tune", "table")
    results, left = short(device, tmp_path, phases)
    assert left == 0
    assert [r for r in results if "failure" in r] == []
    kinds = [r["item"].split("/")[0] for r in results]
    assert list(dict.fromkeys(kinds)) == [
        "machine", "ceiling", "launch", "host", "tune", "table", "compile", "check",
    ]  # fmt: skip
    assert all((tmp_path / part).is_dir() for part in CACHES.values() if part != "cupy")  # there is no CuPy here
    assert read(tmp_path) == results
    table = results[-1]
    assert table["candidates"] == {OURS: "direct"}
    assert len(table["times"][OURS]) >= 6
    text = markdown(results, WANTED, left)
    assert "INCOMPLETE: torch, NCHW did not take part: torch" in text
    assert "3 right, 0 not, 0 not for this GPU" in text
    again, left = short(device, tmp_path, phases)
    assert [r["item"] for r in again[len(results) :]] == ["machine"]


def test_what_times_nothing_is_done_side_by_side(short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIDE_BY_SIDE", 2)
    begun: list[Helper] = []
    monkeypatch.setattr(bench, "Helper", lambda *given: begun.append(Helper(*given)) or begun[-1])
    results, left = short(Narrow(capability=80), tmp_path)
    assert left == 0
    assert [r for r in results if "failure" in r] == []
    assert len(begun) == 2  # for the two checks of the only kernel
    assert sorted(r["item"][-2:] for r in results if r["item"].startswith("check/")) == ["/0", "/1"]
    assert read(tmp_path) == results


def test_an_interrupted_run_goes_on_where_its_lines_end(short: Any, tmp_path: Path) -> None:
    device = Narrow(capability=80)
    results, left = short(device, tmp_path, budget=0.0)
    assert [r["item"] for r in results] == ["machine"]
    assert left == len(some(("check",), algorithms(device), WANTED))
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"item": "ceiling/copy", "per_second": 1e12}\n{"item": "ceiling/float32", "per_sec')
    results, left = short(device, tmp_path)
    assert left == 0
    measured = [r["item"] for r in results if r["item"].startswith("ceiling/")]
    assert sorted(measured) == sorted(f"ceiling/{what}" for what in CEILINGS)
    assert read(tmp_path) == results
    with pytest.raises(PlanError, match="holds results of cuda-emulated_sm_80-sm80-4SMs, this is cuda-emulated_sm_90"):
        short(Narrow(capability=90), tmp_path)


def test_an_interruption_begins_nothing_more(short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    helpers: list[Helper] = []
    both = threading.Event()

    def ask(self: Helper, item: str, patience: float) -> dict[str, Any]:
        if self not in helpers:
            helpers.append(self)
        if item != "machine" and self is helpers[0]:  # of those side by side the one that is waited for first
            assert both.wait(60)
            raise KeyboardInterrupt
        asked.append(item)
        if len(helpers) > 1:
            both.set()
            time.sleep(0.1)  # for whoever waits to notice
        return {"key": "x"}

    monkeypatch.setattr(bench, "SIDE_BY_SIDE", 2)
    monkeypatch.setattr(bench, "UNTIMED", ("ceiling", "launch", "check", "compile", "host"))
    monkeypatch.setattr(Helper, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        short(Narrow(capability=80), tmp_path)
    assert len(asked) < len(some(("check",), algorithms(Narrow(capability=80)), WANTED))
    assert [r["item"] for r in read(tmp_path)] == asked, "what had begun is kept"


def test_a_fault_of_one_kernel_is_a_line_and_the_rest_goes_on(
    short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", "wrong dies compiles")
    results, left = short(Narrow(capability=80), tmp_path)
    assert left == 0
    failures = {r["item"].split("/")[1]: r["failure"] for r in results if r["item"].startswith("launch/faulty")}
    assert failures["faulty.wrong"].startswith("error ")
    assert failures["faulty.dies"] == "exited with status 9"
    assert failures["faulty.compiles"] == "CompileError: NVRTC 13.0 for sm_80: no"
    assert all("failure" not in r for r in results if "/direct/" in r["item"])
    assert "faulty.dies" in markdown(results, WANTED, left)


def test_a_lost_device_ends_its_process_and_not_the_run(
    short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOST", str(tmp_path / "lost"))
    device = Losing(capability=80)
    process = Helper(device, tmp_path)
    assert "name" in process.ask("machine", 1e6)
    first = process._process
    found = process.ask(f"launch/strays/{Strays().version}", 1e6)
    assert found == {
        "failure": "RuntimeError: an illegal memory access was encountered",
        "lost": "cudaErrorIllegalAddress",
    }
    assert "name" in process.ask("machine", 1e6)
    assert process._process is not first
    process.close()


def test_a_tuning_worker_that_loses_the_device_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOST", str(tmp_path / "lost"))
    cache = TuningCache(tmp_path, system=None)
    made = plan(LAYER, device=Losing(capability=80), cache=cache, isolate=True)
    assert made.candidate.algorithm == "direct"
    failure = str(made.facts["strays"].failure)
    assert failure.startswith("exited with status 70: emulated sm_80 is lost to this process (cudaErrorIllegalAddress)")
    assert cache.load(LAYER.key(), made.device.key) is not None


def test_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    process = Helper(Narrow(capability=80), tmp_path)
    assert process.ask("machine", 0.01) == {"failure": "overran: no sign of life for 0.01 s"}
    assert "name" in process.ask("machine", 1e6)
    process.close()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options, "resolve", lambda name: Narrow(capability=80))
    monkeypatch.setattr(bench, "items", some)
    net = tmp_path / "net.yaml"
    net.write_text("{name: tiny, layers: [{name: one, C: 2, H: 3, K: 2, R: 1}]}", encoding="utf-8")
    out = tmp_path / "out"
    command = ["bench", str(net), "--device", "cuda", "--budget", "100", "-o", str(out), "--batch", "1"]
    assert main([*command, "--phase", "tune", "--export"]) == 1  # nothing is compared yet
    text = capsys.readouterr().out
    assert text == (out / "table.md").read_text()
    assert "INCOMPLETE: float32: 1 layers were not compared" in text
    (exported,) = (out / "cache").glob("*.json")
    assert "fwd-float32-NCHW-N1-C2" in exported.read_text()
    assert main(["bench", "--device", "cuda"]) == 2
    assert "expected -o DIRECTORY" in capsys.readouterr().err
    assert main([*command, "--phase", "all"]) == 2
    assert "expected some of check,tune,table" in capsys.readouterr().err


def test_failures_that_went_well_later_or_are_of_other_kernels_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Narrow(capability=80)
    code = registry.code_of(algorithms(device))
    machine = {"item": "machine", "name": "emulated", "autoconv": "1", "commit": "c"}
    machine |= {name: {} for name in ("versions", "baselines", "vendors", "missing")}
    found = [
        machine,
        {"item": "check/direct/1/0", "failure": "of other kernels", "code": "of before"},
        {"item": "check/direct/2/0", "failure": "no memory", "code": code},
        {"item": "check/direct/2/0", "code": code},
        {"item": "check/direct/2/1", "failure": "error 1e-1", "code": code},
    ]
    monkeypatch.setattr(options, "resolve", lambda name: device)
    monkeypatch.setattr(bench, "run", lambda *given, **rest: (found, 0))
    assert main(["bench", "--device", "cuda", "-o", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    assert "kernels against float64: 1 right, 1 not, 0 not for this GPU" in text
    assert "error 1e-1" in text
    assert "of other kernels" not in text
    assert "no memory" not in text


@pytest.mark.parametrize("part", ["lines", "table"])
def test_a_full_disk_is_a_failure_and_no_bad_usage(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(options, "resolve", lambda name: Narrow(capability=80))
    if part == "lines":
        monkeypatch.setattr(bench.lines, "adding", lambda path: nullcontext(fails))
        monkeypatch.setattr(Helper, "ask", lambda self, item, patience: {"key": "x"})
    else:
        monkeypatch.setattr(bench, "run", lambda *given, **rest: ([], 0))
        monkeypatch.setattr(command, "write_whole", fails)
    out = tmp_path / "out"
    assert main(["bench", "--device", "cuda", "--budget", "0", "-o", str(out)]) == 1
    said = capsys.readouterr()
    where = f"the results in {out} are kept up to here: " if part == "lines" else ""
    assert said.err == f"autoconv: error: {where}No space left on device\n"
    assert bool(said.out) == (part == "table")


def test_an_item_that_the_budget_cuts_short_is_still_to_be_done(
    short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overran = {"failure": f"{OVERRAN}: no sign of life for 20 s"}
    monkeypatch.setattr(Helper, "ask", lambda self, item, patience: {"key": "x"} if item == "machine" else overran)
    results, left = short(Narrow(capability=80), tmp_path, budget=0.2)
    assert [r["item"] for r in results] == ["machine"]
    assert left == len(some(("check",), algorithms(Narrow(capability=80)), WANTED))
    results, left = short(Narrow(capability=80), tmp_path)
    assert left == 0
    assert results[1] == read(tmp_path)[1]
    assert results[2]["failure"] == overran["failure"]
