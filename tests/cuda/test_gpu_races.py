"""Races of a model on a GPU, with a CuPy of NumPy arrays, and PyTorch on the CPU in the place of PyTorch on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gpu_graphs import cupy
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy, Stream

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from torch import nn  # noqa: E402

from autoconv.bench.networks import on_gpu, pytorch  # noqa: E402
from autoconv.bench.networks.on_gpu import raced_on_gpu  # noqa: E402
from autoconv.bench.networks.race import keep  # noqa: E402
from autoconv.cuda.device import CUDA  # noqa: E402

__all__ = ["cupy"]  # a fixture

pytestmark = [
    pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # PyTorch's own, when it exports
]


class Graphs:
    """PyTorch's graphs: what is captured is computed at once, so that a replay leaves the answer as it is."""

    def __init__(self) -> None:
        self.captured = self.replays = self.freed = 0
        self.streams: list[int] = []

    def make(self) -> Any:
        def replay() -> None:
            self.replays += 1

        return SimpleNamespace(replay=replay)

    def capture(self, graph: Any) -> Any:
        self.captured += 1
        return nullcontext()

    def free(self) -> None:
        self.freed += 1


@pytest.fixture
def graphs(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()
    for name, what in {
        "CUDAGraph": found.make,
        "graph": found.capture,
        "device": lambda index: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "ExternalStream": found.streams.append,
        "synchronize": lambda: None,
        "empty_cache": found.free,
    }.items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(on_gpu, "_there", lambda what, device: what)
    monkeypatch.setattr(on_gpu, "settle", lambda: None)
    monkeypatch.setattr(on_gpu, "SLOT", 0.0)

    def model(name: str) -> tuple[Any, int]:
        if name == "broken":
            raise RuntimeError("no such\nmodel")
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()
        nn.init.normal_(layers[1].running_mean)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)), 6

    monkeypatch.setattr(on_gpu, "pytorch_model", model)
    return found


def test_graphs_of_a_model_race(graphs: Graphs, cupy: FakeCuPy, tmp_path: Path) -> None:
    said: list[str] = []
    found = raced_on_gpu("small", 2, CUDA(0), 6, 0.05, say=said.append)
    assert found.failures == {}
    assert {who: len(samples) for who, samples in found.times.items()} == {"autoconv": 6, "torch": 6, "torch_cl": 6}
    assert found.times["torch"] == [0.00025 / on_gpu.REPLAYS] * 6
    assert set(found.errors) == {"torch", "torch_cl"}
    assert all(0 < error < 1e-5 for error in found.errors.values())
    assert graphs.captured == 2
    assert graphs.replays == 2 * (1 + 7 * (1 + on_gpu.REPLAYS))  # the answer, and a sample more than there are rounds
    assert len(set(graphs.streams)) == 1
    assert graphs.freed == 2
    assert said == [f"small: {what}" for what in
                    ("loading", "tuning", "capturing torch", "capturing torch_cl", "timing")]  # fmt: skip

    keep(found, tmp_path, "inference.json")
    keep(found, tmp_path, "inference.json")  # in its place
    (row,) = json.loads((tmp_path / "inference.json").read_text(encoding="utf-8"))["networks"]
    assert (row["network"], row["batch"], row["rounds"], row["budget"]) == ("small", 2, 6, 0.05)
    assert "threads" not in row
    assert row["device"]["name"] == "Fake GPU"
    assert row["device"]["versions"]["cupy"] == cupy.__version__
    assert row["pytorch"]
    assert set(row["candidates"].values()) == {"direct"}
    assert len(row["candidates"]) == 2
    assert row["arena_bytes"] > 0
    assert row["tuning"] > 0
    assert set(row["loading"]) == set(row["seconds"]) == {"autoconv", "torch", "torch_cl"}
    assert set(row["ratios"]) == {"torch", "torch_cl"}


def test_ours_is_tuned_as_told(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Network(on_gpu.CompiledNetwork):
        def tune(self, mode: str = "profile", **options: Any) -> Any:
            told.append((mode, options))
            return super().tune(mode, **options)

    monkeypatch.setattr(on_gpu, "CompiledNetwork", Network)
    raced_on_gpu("small", 1, CUDA(0), 1, 0.3)
    assert told == [("hybrid", {"budget": 0.3})]


def test_batch_normalisation_is_folded_and_the_input_stays(graphs: Graphs) -> None:
    model, size = on_gpu.pytorch_model("small")
    images = on_gpu.pytorch_images(2, size)
    replay: Any = on_gpu._replayed(model.eval(), images, CUDA(0), torch.channels_last)
    folded, x = replay.held
    assert [node.target for node in folded.graph.nodes if node.op == "call_module"] == ["0", "2", "3", "4", "5", "6"]
    assert folded.get_submodule("0").weight.is_contiguous(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert replay() is replay()
    with torch.no_grad():
        np.testing.assert_allclose(replay().numpy(), model(images).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", [True, False])
def test_who_fails_or_errs_has_no_time(broken: bool, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = on_gpu._replayed

    def spoiled(model: Any, images: Any, device: CUDA, memory_format: Any) -> Any:
        if memory_format is not torch.channels_last:
            return replayed(model, images, device, memory_format)
        if broken:
            raise RuntimeError("out of\nmemory")
        return lambda: replayed(model, images, device, memory_format)() * 1.01

    monkeypatch.setattr(on_gpu, "_replayed", spoiled)
    found = raced_on_gpu("small", 1, CUDA(0), 1, 0.05)
    assert set(found.times) == {"autoconv", "torch"}
    said = "out of memory" if broken else "its answer differs from that of autoconv by 1.0e-02 of the largest value"
    assert found.failures == {"torch_cl": said}


def test_a_sample_fills_a_slot(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many runs as make it long enough by the first ones, between two events on the stream on which they run."""
    calls: list[Stream] = []
    stream = cupy.cuda.Stream(non_blocking=True)
    monkeypatch.setattr(on_gpu, "SLOT", 0.002)
    with stream:
        sample = on_gpu._sampler(lambda: calls.append(cupy.current_stream), stream, CUDA(0))
        assert len(calls) == 1 + on_gpu.REPLAYS
        assert sample() == pytest.approx(0.00025 / 32)  # of what the fake says of any two events
    assert len(calls) == 1 + on_gpu.REPLAYS + 1 + 32
    assert set(calls) == {stream}


Invoked = Callable[..., Any]


@pytest.fixture
def invoked(graphs: Graphs, tmp_path: Path) -> Invoked:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(pytorch.main, [*arguments, "--budget", "0.05", "-o", str(tmp_path)])

    return run


def test_one_that_fails_does_not_stop_the_others(invoked: Invoked, tmp_path: Path) -> None:
    done = invoked("inference", "one", "broken", "two", "--device", "cuda", "--batch", "2", "--rounds", "1")
    assert done.exit_code == 1
    assert "broken: RuntimeError: no such model\n" in done.stderr
    rows = json.loads((tmp_path / "inference.json").read_text(encoding="utf-8"))["networks"]
    assert [row["network"] for row in rows] == ["one", "two"]
    assert "one, batch 2\n  autoconv " in done.stdout
    table = done.stdout[done.stdout.index("inference, batch 2") :]
    assert table.split()[3:9] == ["network", "autoconv", "vs", "torch", "vs", "torch_cl"]
    assert [line.split()[0] for line in table.splitlines() if line.strip().startswith(("one", "two"))] == ["one", "two"]


def test_when_the_time_is_up_nothing_is_begun(invoked: Invoked, tmp_path: Path) -> None:
    done = invoked("inference", "one", "two", "--device", "cuda", "--time-limit", "0")
    assert done.exit_code == 0
    assert "the time is up, not begun: one, two" in done.stderr
    assert not (tmp_path / "inference.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("training", "one"), 2, "--device, --budget: expected inference"),
        (("inference", "one", "--device", "cuda:7"), 1, "Error: no CUDA device 7: expected 0 to 1"),
    ],
)
def test_what_is_not_there_is_refused(arguments: tuple[str, ...], code: int, said: str, invoked: Invoked) -> None:
    done = invoked(*arguments)
    assert done.exit_code == code
    assert said in done.stderr
