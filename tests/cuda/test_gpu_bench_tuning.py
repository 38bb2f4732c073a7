"""Tuning on hardware, against vendors and other libraries."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_gpus import LAYER, WANTED, Narrow
from layers import operands
from simt.emulator import MISSING

from autoconv import registry
from autoconv.algorithm import Algorithm, Params
from autoconv.bench.gpu import helper
from autoconv.bench.gpu.baselines import Baseline
from autoconv.bench.gpu.helper import OURS, Work
from autoconv.bench.gpu.report import markdown, missing
from autoconv.cuda.device import CUDA
from autoconv.cuda.direct.direct import Direct
from autoconv.cuda.gemm.tensor import Tensor
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.tuning.reference import convolve, error, magnitude

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


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
    assert results[1]["failures"]["wrong"].startswith("its answer differs from that of autoconv by")
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
    with pytest.raises(ValueError, match="expected the same on both sides"):
        baseline.prepare(LAYER.replace(padding=((0, 1), (0, 0))), device, a, b)


class Playing(Narrow):
    def adopt(self, array: object, name: str, *, written: bool = False) -> Any:
        return np.from_dlpack(array)  # type: ignore[arg-type]


def test_what_verification_asks_of_cupy_is_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "DTYPES", ("float32",))
    assert Work(Narrow(capability=80), tmp_path, {}).warm() == {"kinds": 2}


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
