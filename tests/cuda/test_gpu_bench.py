"""The one command for the hour with hardware, from end to end on the emulated device."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import operands
from simt.emulator import MISSING, Emulated

from autoconv import registry
from autoconv.algorithm import Algorithm, Kernel, Params
from autoconv.bench import gpu as bench
from autoconv.bench.gpu import CACHES, RESULTS, Helper, code_of, helper, preview, read
from autoconv.bench.gpu.agenda import CEILINGS, FIRST, SANITIZED, Target, compared_after, items, targets, timetable
from autoconv.bench.gpu.archive import ArchiveError, pack, unpack
from autoconv.bench.gpu.baselines import Baseline
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.bench.gpu.helper import OURS, Work
from autoconv.bench.gpu.report import markdown, missing
from autoconv.bench.gpu.sanitized import FOUND, MARK, TOOL
from autoconv.cli import main, options
from autoconv.cuda.codegen.compiler import CompileError
from autoconv.cuda.device import CUDA
from autoconv.cuda.direct.direct import Direct
from autoconv.cuda.gemm.tensor import Tensor
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.registry import algorithms
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude
from autoconv.tuning.worker import OVERRAN

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
LAYER = ConvLayer(N=1, C=2, H=4, W=4, K=2, R=3, S=3, padding=1)
WANTED = [Target("small", (LAYER,))]


class Narrow(Emulated):
    """An emulated GPU with the direct kernels, and, under other names, some that go wrong."""


class Faulty(Direct):
    """Right but for one fault."""

    version = "of this test"  # type: ignore[assignment]  # it is no part of the package

    def __init__(self, fault: str) -> None:
        self.name, self.fault = f"faulty.{fault}", fault  # type: ignore[misc]

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        if self.fault == "dies":
            os._exit(9)
        if self.fault == "compiles":
            raise CompileError("NVRTC 13.0 for sm_80: no")
        kernel = super().build(layer, device, params)
        run = kernel.run

        def wrong(*arguments: Any) -> None:
            run(*arguments)
            arguments[2][...] = 7

        kernel.run = wrong  # type: ignore[method-assign]
        return kernel


def faulty() -> tuple[Algorithm, ...]:
    return tuple(map(Faulty, os.environ.get("FAULTS", "").split()))


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
def _(device: Narrow) -> tuple[Algorithm, ...]:
    return (Direct(), *faulty())


@registry.algorithms.register
def _(device: Losing) -> tuple[Algorithm, ...]:
    return (Direct(), Strays())


def some(phases: Any, algorithms: Any, wanted: Any) -> list[str]:
    """The items without most of the checks, without the many kinds to warm, and without networks, which want CuPy."""
    found = [i for i in items(phases, algorithms, wanted) if not i.startswith(("warm", "network/", "operator/"))]
    return [i for i in found if not i.startswith("check/") or i.endswith(("/0", "/1"))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[bench.Result], int]]:
    monkeypatch.setattr(bench, "items", some)

    def run(device: Device, folder: Path, phases: tuple[str, ...] = ("check",), budget: float = 1e6) -> Any:
        return bench.run(device, folder, phases, budget, WANTED)

    return run


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


def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Helper(Narrow(capability=80), tmp_path)
    assert process.ask("machine", 0.01) == {"failure": "overran: no sign of life for 0.01 s"}
    assert "name" in process.ask("machine", 1e6)
    process.close()


class Twice(Baseline):
    """Another library: right, or not; at a known time."""

    def missing(self) -> str:
        return ""

    def version(self) -> str:
        return "1.0"

    def prepare(self, layer: ConvLayer, device: Device, a: Any, b: Any) -> tuple[Callable[[], float], Any]:
        answer = convolve(layer, a, b) + (0.0 if self.channels_last else 1.0)
        return (lambda: 5e-5), answer


def test_ratios_to_baselines_and_a_wrong_baseline(tmp_path: Path) -> None:
    baselines = {"right": Twice(channels_last=True), "wrong": Twice(channels_last=False)}
    work = Work(Narrow(capability=80), tmp_path, baselines)
    results = [{"item": i} | work.do(i) for i in ("machine", f"table/hybrid/{LAYER.key()}")]
    assert results[1]["failures"]["wrong"].startswith("its answer differs by")
    text = markdown(results, WANTED, 0)
    assert "| small | 1 of 1 | 2.50 [2.50 2.50] | 2.50 [2.50 2.50] | - |" in text  # 5e-5 s over the emulator's 2e-5
    assert f"INCOMPLETE: {LAYER}: wrong: its answer differs" in text
    assert len(missing(results, WANTED, 0)) == 1
    assert missing(results, WANTED, 3)[1:] == ["3 items were not reached"]
    del results[1]["failures"]["wrong"]
    assert missing(results, WANTED, 0) == []
    assert missing([], WANTED, 0) == ["the device did not answer"]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_torch_is_called_as_it_stands(direction: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of the baseline's Python, with torch's own CPU in place of a GPU, its events and graphs played."""
    torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    played: list[str] = []

    class Graph:
        def replay(self) -> None:
            played.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            played.append("event")

        def synchronize(self) -> None:
            played.append("wait")

        def elapsed_time(self, stop: Event) -> float:
            return 3.2  # milliseconds

    for name, fake in (
        ("CUDAGraph", Graph),
        ("Event", Event),
        ("graph", lambda graph: contextlib.nullcontext()),
        ("synchronize", lambda: None),
        ("is_available", lambda: True),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    for holder, name in ((torch.backends.cudnn, "benchmark"), (torch.backends.cudnn, "allow_tf32")):
        monkeypatch.setattr(holder, name, getattr(holder, name))
    baseline = Baseline(channels_last)
    assert "TF32 off" in baseline.version()
    for layout in ("NCHW", "NHWC"):
        layer = LAYER.replace(direction=direction, layout=layout, N=2)
        a, b, *_ = operands(layer)
        device = Playing(capability=80)
        sample, answer = baseline.prepare(layer, device, a, b)
        assert torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.allow_tf32
        assert error(answer, convolve(layer, a, b), magnitude(layer, a, b)) <= 2e-6
        played.clear()
        assert sample() == pytest.approx(3.2e-3 / (4 * 64))  # four replays of 64 launches
        assert played == ["replay", "event", *["replay"] * 4, "event", "wait"]
    with pytest.raises(ValueError, match="torch pads both sides alike"):
        baseline.prepare(LAYER.replace(padding=((0, 1), (0, 0))), device, a, b)


class Playing(Narrow):
    def adopt(self, array: object, name: str) -> Any:
        return np.from_dlpack(array)  # type: ignore[arg-type]


def test_the_targets_are_of_the_networks_longest_first() -> None:
    found = {target.name: target.layers for target in targets()}
    assert list(found)[:2] == ["float32, 3x3 and 5x5", "float32"]
    assert set(found["float32, 3x3 and 5x5"]) < set(found["float32"])
    assert found["float32"][0].flops > found["float32"][-1].flops
    assert {x.layout for x in found["bfloat16, NHWC"]} == {"NHWC"}
    assert {x.N for layers in found.values() for x in layers} <= {8, 32}
    assert all(not x.has_epilogue for layers in found.values() for x in layers)


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


def test_every_target_has_figures_early() -> None:
    """After a third of three quarters of an hour, by the guesses, the longest layers of each target are compared."""
    table, wanted = algorithms(Narrow(capability=90)), targets()
    work = list(items(("check", "tune", "table"), table, wanted))
    assert len(set(work)) == len(work)
    compared = compared_after(timetable(work, table, []), [])
    for target in wanted:
        assert all(compared[layer.key()] <= 900 for layer in target.layers[:FIRST]), target.name
        assert all(layer.key() in compared for layer in target.layers)
    halves = [i for i in work if i.startswith("tune/hybrid/fwd-float16-NHWC")]
    brains = [i for i in work if i.startswith("tune/hybrid/fwd-bfloat16-NHWC")]
    assert [i.replace("float16", "bfloat16") for i in halves] == brains
    assert all(work.index(half) < work.index(brain) for half, brain in zip(halves, brains, strict=True))


def test_a_sanitizer_comes_first() -> None:
    first = list(itertools.islice(items(("check",), algorithms(NOMINAL), WANTED), len(SANITIZED) + 1))
    assert [item.split("/")[:2] for item in first] == [*(["sanitize", name] for name in SANITIZED), ["warm"]]


@pytest.mark.parametrize("complaint", ["", "Invalid __global__ read of size 4 bytes"])
def test_what_a_sanitizer_says_is_the_result(complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that runs what it is given, and complains or does not."""
    tool = tmp_path / "bin" / TOOL
    tool.parent.mkdir()
    ending = f"echo '========= {complaint}'; echo '=========     at gemm'; exit {FOUND}" if complaint else ""
    tool.write_text(f"#!/bin/sh\necho '{MARK} {TOOL}'\nshift 4\n\"$@\"\n{ending}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    work = Work(Narrow(capability=80), tmp_path)
    found = work.do(f"sanitize/direct/{work.algorithms['direct'].version}")
    if complaint:
        assert found == {"failure": f"{TOOL}: {complaint}; at gemm"}
    else:
        assert found["error"] <= found["bound"]
    machine = {"item": "machine", "name": "a GPU", "versions": {}, "autoconv": "0", "commit": "0", "baselines": {}}
    text = markdown([machine | {"vendors": {}, "missing": {}}, {"item": "sanitize/direct/1"} | found], [], 0)
    assert f"- compute-sanitizer on direct: {found.get('failure', 'nothing to complain of')}\n" in text


def test_without_a_sanitizer_the_item_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    work = Work(Narrow(capability=80), tmp_path)
    assert "expected it in PATH" in work.do(f"sanitize/direct/{work.algorithms['direct'].version}")["skipped"]


def test_a_dry_run_says_what_is_left_and_learns_from_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = preview(tmp_path, ("tune", "table"), 60, WANTED)
    whole = [f"tune/hybrid/{LAYER.key()}", f"table/hybrid/{LAYER.key()}"]
    assert [line.split()[1] for line in lines[:4]] == ["machine", "warm", *whole]
    assert lines[-2] == "small: figures after   0:51; 1 of 1 layers within the budget"
    seconds = {"warm": 1.0, f"table/hybrid/{LAYER.replace(N=2).key()}": 1.0, whole[0]: 400.0}
    (tmp_path / RESULTS).write_text("".join(f'{{"item": "{i}", "seconds": {s}}}\n' for i, s in seconds.items()))
    lines = preview(tmp_path, ("tune", "table"), 60, WANTED)
    assert [line.split()[1] for line in lines[:2]] == ["machine", whole[1]]
    assert lines[-1].startswith("4 items, expected to take   6:")
    command = ["bench", "alexnet", "--device", "cuda", "-o", str(tmp_path / "new"), "--dry-run", "--phase", "check"]
    assert main(command) == 0
    assert "float32: figures never; 0 of 5 layers within the budget" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_what_failed_is_tried_again_with_other_kernels(tmp_path: Path) -> None:
    tune, table = (f"{kind}/hybrid/{LAYER.key()}" for kind in ("tune", "table"))
    codes = {tune: code_of(algorithms(NOMINAL)), table: "of another day"}
    lines = [{"item": i, "code": code, "failure": "no", "seconds": 1.0} for i, code in codes.items()]
    (tmp_path / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = [line.split()[1] for line in preview(tmp_path, ("tune", "table"), 60, WANTED)[:-2]]
    assert table in work
    assert tune not in work


def test_what_verification_asks_of_cupy_is_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "DTYPES", ("float32",))
    assert Work(Narrow(capability=80), tmp_path, {}).warm() == {"kinds": 2}


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


class Library(Direct):
    """A vendor's algorithm."""

    name, vendor = "library", "vendor"
    version = "of this test"  # type: ignore[assignment]  # it is no part of the package

    def installed(self) -> bool:
        return True


class Few(Tensor):
    """Two tiles of tensor cores: the emulator compiles each."""

    version = "of this test"  # type: ignore[assignment]  # it is no part of the package

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        return itertools.islice(super().candidates(layer, device), 2)


class Both(Narrow):
    """A GPU with our kernels and those of a library."""


@registry.algorithms.register
def _(device: Both) -> tuple[Algorithm, ...]:
    return (Direct(), Few(), Library())


def test_one_race_answers_with_vendors_and_without(tmp_path: Path) -> None:
    work = Work(Both(capability=80), tmp_path, {})
    found = work.tune("hybrid", LAYER.key())
    assert (found["entrants"], found["candidate"], set(found["timings"])) == (2, "direct", {"direct", "library"})
    assert found["failures"] == {}
    record = work.cache.load(LAYER.key(), work.device.key)
    assert record is not None
    assert len(record.races) == 1
    assert work.table("hybrid", LAYER.key())["times"].keys() == {OURS}  # of equals ours is the choice


def test_bfloat16_times_what_was_fast_in_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "FEW", 1)
    work = Work(Both(capability=80), tmp_path, {})
    half = LAYER.replace(dtype="float16", layout="NHWC", C=8, K=8)
    assert work.tune("profile", half.key())["entrants"] > 3
    found = work.tune("profile", half.replace(dtype="bfloat16").key())
    assert found["entrants"] == 2
    assert "library" in found["timings"]


def test_an_archive_carries_the_folder_in_parts(tmp_path: Path) -> None:
    folder, archive = tmp_path / "results", tmp_path / "away" / "state.tgz"
    (folder / "kernels").mkdir(parents=True)
    noise = np.random.default_rng(0).bytes(100_000)
    (folder / "kernels" / "one").write_bytes(noise)
    (folder / RESULTS).write_text('{"item": "warm"}\n')
    parts = pack(folder, archive, 40_000)
    assert [(path.name, path.stat().st_size <= 40_000) for path in parts] == [
        (f"state.tgz.00{number}", True) for number in range(3)
    ]
    assert unpack(archive, tmp_path / "there")
    assert (tmp_path / "there" / "kernels" / "one").read_bytes() == noise
    assert read(tmp_path / "there") == [{"item": "warm"}]
    for damage in (parts[2].unlink, lambda: parts[1].write_bytes(b"\0" * 40_000)):
        damage()
        with pytest.raises(ArchiveError, match=r"expected a whole archive in state\.tgz\.000 to"):
            unpack(archive, tmp_path / "elsewhere")
        assert not list((tmp_path / "elsewhere").iterdir())
    (folder / "kernels" / "one").unlink()
    assert pack(folder, archive, 40_000) == parts[:1]
    assert [path.name for path in sorted(archive.parent.iterdir())] == ["state.tgz.000"]
    assert not unpack(tmp_path / "none", tmp_path / "empty")


def test_the_command_carries_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[list[str]] = []

    def run(device: Device, folder: Path, *_: Any, **__: Any) -> Any:
        folder.mkdir(exist_ok=True)
        done.append([result["item"] for result in read(folder)])
        with (folder / RESULTS).open("a") as file:
            file.write('{"item": "warm"}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(options, "resolve", lambda name: Narrow(capability=80))
    command = ["bench", "alexnet", "--device", "cuda", "--archive", str(tmp_path / "state.tgz"), "--part", "1", "-o"]
    for machine in ("first", "second"):
        assert main([*command, str(tmp_path / machine)]) == 130
    assert done == [[], ["warm"]]
    assert main([*command, str(tmp_path)]) == 2
    assert "expected a place outside of" in capsys.readouterr().err
