"""A network on autoconv against other runtimes: each in a process of its own, interleaved, answers compared."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.bench.agreement import disagreement, refused
from autoconv.bench.networks.models import fixed
from autoconv.bench.networks.process import RuntimeProcess
from autoconv.bench.networks.runtimes import RUNTIMES
from autoconv.bench.race import interleaved
from autoconv.bench.results import rounded, write
from autoconv.bench.statistics import Ratio, interval, ratios
from autoconv.bench.suites import OURS, Raced, Samples
from autoconv.common.text import one_line
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import ConfigError, PlanError
from autoconv.networks.operators import TensorType, random_inputs
from autoconv.tuning.process import NoAnswerError
from autoconv.tuning.timing.full_speed import FullSpeed

FILE = "networks.json"  # of a folder of results


@dataclass
class NetworkRace(Raced):
    """What a race of runtimes on one network found.

    Attributes
    ----------
    network : str
        The name of its file.
    batch : int
    device : CPU or CUDA
    rounds : int
    times : dict of str to list of float
        Every contestant's seconds in every round.
    loading : dict of str to float
        Seconds until each was ready to run.
    memory : dict of str to int or None
        Bytes that the first runs took beyond those of the loaded network.
    errors : dict of str to float
        The largest difference of an answer to ours, relative to the largest value.
    failures : dict of str to str
        Why a contestant has no times.
    facts : dict
        What ours says of itself: the bytes of its arena and its weights, and the nodes that no kernel of ours computes;
        on a GPU what ran there, too.
    slow : int
        Samples that were taken although the threads were not at their full speed.
    """

    network: str
    batch: int
    device: Device
    rounds: int
    times: dict[str, Samples] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    slow: int = 0

    def against(self, name: str) -> Ratio | None:
        """Another runtime's time over ours."""
        if name not in self.times or OURS not in self.times:
            return None
        return interval(ratios(self.times[name], self.times[OURS]))

    def judge(self, answers: Mapping[str, np.ndarray], most: float) -> None:
        """Note by how much answers differ from ours, and as a failure where that is more than the most allowed."""
        for contestant in [name for name in answers if name != OURS and OURS in answers]:
            error = self.errors[contestant] = disagreement(answers[contestant], answers[OURS])
            if why := refused(error, most):
                self.failures[contestant] = why

    def to_json(self) -> dict[str, Any]:
        """All of it in plain JSON types."""
        others = [name for name in self.times if name != OURS]
        found = {name: ratio for name in others if (ratio := self.against(name))}
        return {
            "network": self.network,
            "batch": self.batch,
            **({"threads": self.device.threads} if isinstance(self.device, CPU) else {}),
            "device": {"name": self.device.name, "key": self.device.key, "versions": self.device.versions},
            "runtimes": {name: RUNTIMES[name].version for name in RUNTIMES if name in (*others, *self.failures)},
            "date": datetime.now(UTC).date().isoformat(),
            "rounds": self.rounds,
            "best": self.best,
            "ratios": {name: asdict(ratio) for name, ratio in found.items()},
            "seconds": rounded(self.times),
            "slow": self.slow,
            "loading": {name: round(seconds, 3) for name, seconds in self.loading.items()},
            "memory": self.memory,
            "errors": {name: float(f"{error:.2g}") for name, error in self.errors.items()},
            "failures": self.failures,
            **self.facts,
        }


def race_network(
    model: Path,
    inputs: dict[str, TensorType],
    batch: int,
    device: CPU,
    names: Sequence[str],
    rounds: int,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> NetworkRace:
    """Race autoconv, which runs by what is on record, with other runtimes, on random numbers.

    Parameters
    ----------
    model : Path
        An ONNX file.
    inputs : dict of str to TensorType
        What the network takes.
    batch : int
        In the place of a first dimension that the file leaves open.
    device : CPU
        With the number of threads for all.
    names : sequence of str
        Of `RUNTIMES`.
    rounds : int
    say : callable
        Called with what is done next.

    Returns
    -------
    NetworkRace

    Raises
    ------
    ConfigError
        When the file is none of ONNX.
    PlanError
        When autoconv itself cannot load or run it.
    """
    found = NetworkRace(model.stem, batch, device, rounds)
    contestants: dict[str, RuntimeProcess] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.onnx"
        path.write_bytes(_static(model, batch))
        drawn = random_inputs(inputs)
        np.savez(folder / "inputs.npz", np.array(list(drawn)), *drawn.values())  # in order, whatever their names are
        try:
            want: list[np.ndarray] = []
            for contestant in (OURS, *names):
                say(f"loading {found.network} with {contestant}")
                process = contestants[contestant] = RuntimeProcess(contestant, device)
                try:
                    outputs, facts = process.load(path, folder)
                    found.loading[contestant], found.memory[contestant] = facts.pop("seconds"), facts.pop("memory")
                    found.facts |= facts
                    if contestant == OURS:
                        want = outputs
                    else:
                        found.errors[contestant] = _difference(outputs, want)
                except (PlanError, NoAnswerError) as failure:
                    if contestant == OURS:  # nothing to compare the others with
                        raise PlanError(f"{found.network}: {OURS}: {one_line(failure, 200)}") from None
                    found.failures[contestant] = one_line(failure, 200)
                    contestants.pop(contestant).close()
            say(f"timing {found.network}")
            full_speed = FullSpeed.of(device)
            samplers = {name: partial(_sample, found, contestants[name]) for name in contestants}
            times = interleaved(samplers, rounds, full_speed.take)
            found.slow = full_speed.slow
            found.times = {name: samples for name, samples in times.items() if name not in found.failures}
        finally:
            for process in contestants.values():
                process.close()
    return found


def _difference(outputs: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """By how much answers differ from ours; a PlanError where that is too much."""
    error = float(np.max([*map(disagreement, outputs, want)])) if len(outputs) == len(want) else math.inf
    if why := refused(error):
        raise PlanError(why)
    return error


def _sample(found: NetworkRace, process: RuntimeProcess) -> float:
    """A sample, or why there will be none."""
    if process.name not in found.failures:
        try:
            return process.sample()
        except (PlanError, NoAnswerError) as failure:
            found.failures[process.name] = one_line(failure, 200)
    return math.nan


def _static(model: Path, batch: int) -> bytes:
    """The file's model with a batch."""
    from autoconv.networks.onnx_reader.model import load_model

    return bytes(fixed(load_model(model), batch).SerializeToString())


def keep(found: NetworkRace, folder: Path, file: str = FILE) -> None:
    """Add a race to a folder's file, in the place of an older one of this network, batch and number of threads.

    A folder is of one device: no race on a GPU has threads.

    One in which autoconv itself failed compares nothing, and is not kept.

    Raises
    ------
    ConfigError
        As `kept` does.
    """
    if OURS not in found.times:
        return
    row = found.to_json()
    rows = [*(other for other in kept(folder, file) if _identity(other) != _identity(row)), row]
    write(folder / file, {"networks": sorted(rows, key=_identity)})


def kept(folder: Path, file: str = FILE) -> list[dict[str, Any]]:
    """The races in a folder's file, none where there is no such file.

    Raises
    ------
    ConfigError
        When it is a file of something else.
    """
    path = folder / file
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["networks"] if path.exists() else []
        _ = [_identity(row) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise ConfigError(f"{path}: expected races of networks: {one_line(failure, 200)}") from None
    return rows


def _identity(row: dict[str, Any]) -> tuple[str, int, int]:
    network, batch, threads = found = row["network"], row["batch"], row.get("threads", 0)
    if (type(network), type(batch), type(threads)) != (str, int, int):
        raise ValueError(f"got {found} as a network, its batch and threads")
    return network, batch, threads
