"""What `autoconv bench` measures: layers in classes, under one setting, with every contestant's times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoconv.bench.baselines import ALL_BASELINES
from autoconv.bench.statistics import Ratio, geometric_mean, ratios
from autoconv.tuning.timing.full_speed import slowness

if TYPE_CHECKING:
    from autoconv.cpu.device import CPU
    from autoconv.layer import ConvLayer

OURS = "autoconv"
CLASSES = ("3x3 stride 1", "5x5, stems, dilated", "1x1", "depthwise 3x3", "others")

BUSY = 0.1  # of one core, used by other processes, is too much for a quiet measurement

Samples = list[float]  # seconds, one per round


def as_exported(contestant: str) -> str:
    """What a contestant's runs of the network are called in which one convolution reads what another has written."""
    return f"{contestant}, as exported"


def class_of(layer: ConvLayer) -> str:
    """The class a layer is counted in."""
    if layer.depthwise:
        return "depthwise 3x3" if (layer.R, layer.S) == (3, 3) else "others"
    if (layer.R, layer.S) == (1, 1):
        return "1x1"
    stem = layer.C <= 4 and (max(layer.stride) > 1 or max(layer.R, layer.S) > 3)
    if stem or layer.dilation != (1, 1) or (layer.R, layer.S) == (5, 5):
        return "5x5, stems, dilated"
    plain = (layer.R, layer.S) == (3, 3) and layer.stride == (1, 1) and layer.C > 4
    return "3x3 stride 1" if plain else "others"


@dataclass(frozen=True)
class Setting:
    """What is the same for all layers of a run.

    Parameters
    ----------
    device : CPU
    baselines : tuple of str
        Those that take part.
    direction : "fwd", "dgrad" or "wgrad"
    exact : bool
        Whether ours are only algorithms that do no more to a sum than reorder it.
    constant : bool
        Whether filters may be transformed beforehand.
    fresh : bool
        Whether every run makes a new output.
    rounds : int
        How often each contestant is sampled.
    restrictions : mapping of str to str
        The environment variables that hold libraries below what the processor has.
    isolate : bool
        Whether a worker process does the tuning.
    dtype : str
        In which all layers are computed.
    """

    device: CPU
    baselines: tuple[str, ...]
    direction: str = "fwd"
    exact: bool = False
    constant: bool = True
    fresh: bool = False
    rounds: int = 9
    restrictions: Mapping[str, str] = field(default_factory=dict)
    isolate: bool = True
    dtype: str = "float32"


class Raced:
    """What raced: every contestant's seconds in every round, ours among them."""

    times: dict[str, Samples]

    @property
    def seconds(self) -> dict[str, float]:
        """Median time of every contestant."""
        return {name: statistics.median(samples) for name, samples in self.times.items()}

    @property
    def best(self) -> str | None:
        """The fastest of the others, where ours has a time to compare."""
        others = {name: seconds for name, seconds in self.seconds.items() if name != OURS}
        return min(others, key=others.__getitem__) if others and OURS in self.times else None


@dataclass
class Row(Raced):
    """One layer: every contestant's seconds in every round, or why it has none.

    `unable` has the baselines that cannot compute the layer; `failures` has what went wrong. `errors` has the largest
    difference of every baseline's answer to ours, relative to the largest value.
    `busy` is the share of a core that other processes used meanwhile; `slow` counts the samples that were taken
    although the threads were not at their full speed; `bound` the seconds that our candidate takes at
    least on the measured machine; `recorded` those that it took when it was tuned, its filters cold. `version` is that
    of the candidate's code; None in results of before it was kept.
    """

    name: str
    layer: ConvLayer
    repeat: int
    candidate: str | None = None
    times: dict[str, Samples] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    slow: int = 0
    bound: float | None = None
    recorded: float | None = None
    version: str | None = None

    @property
    def over_bound(self) -> float | None:
        """Our time over the bound."""
        return self.seconds[OURS] / self.bound if self.bound and OURS in self.times else None

    def against(self, baseline: str) -> list[float] | None:
        """The rounds' ratios to one baseline, or to the "best"."""
        name = self.best if baseline == "best" else baseline
        if name is None or name not in self.times or OURS not in self.times:
            return None
        return ratios(self.times[name], self.times[OURS])


@dataclass
class Suite:
    """The rows of one list of layers at one batch size, or of the layers `names` of it.

    `whole` has the runs of all layers in sequence, and `shares` is how much of the network as exported is convolutions,
    by contestant. `unkept` is whether what is there was to be kept on disk, and could not be.
    """

    name: str
    batch: int
    setting: Setting
    layers: int
    network: bool
    rows: list[Row] = field(default_factory=list)
    whole: dict[str, Samples] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    names: tuple[str, ...] = ()
    unkept: bool = False

    @property
    def remarks(self) -> list[str]:
        """What else has to be known of the figures."""
        found, layers = [*self.notes], f"of {len(self.rows)} layers were measured"
        if busy := [row for row in self.rows if row.busy > BUSY]:
            most = max(row.busy for row in busy)
            used = f"other processes used up to {most:.0%} of a core"
            found.append(f"{used} while {len(busy)} {layers}, which disturbs these figures")
        if slow := [row for row in self.rows if row.slow]:
            lacked = slowness(sum(row.slow for row in slow))
            found.append(f"{lacked} while {len(slow)} {layers}, which disturbs these figures")
        return found

    def counted(self, baseline: str, of: str | None = None) -> list[Row]:
        """The layers of one class, or all, that a baseline can compute; for the "best" of them, that any can."""
        names = (self.setting.baselines or (baseline,)) if baseline == "best" else (baseline,)
        rows = [row for row in self.rows if of in (None, class_of(row.layer))]
        return [row for row in rows if any(name not in row.unable for name in names)]

    def mean(self, baseline: str, of: str | None = None) -> Ratio | None:
        """Geometric mean of the ratios to a baseline over the layers that it can compute; None where one has none."""
        return geometric_mean([row.against(baseline) for row in self.counted(baseline, of)])

    def total(self, contestant: str) -> Samples | None:
        """Round by round the sum over the layers, repeats weighted."""
        if not self.rows or any(contestant not in row.times for row in self.rows):
            return None
        return [
            sum(row.repeat * seconds for row, seconds in zip(self.rows, column, strict=True))
            for column in zip(*(row.times[contestant] for row in self.rows), strict=True)
        ]

    @property
    def compared(self) -> dict[str, dict[str, Samples]]:
        """Of a network, every contestant's times: the sum over its layers, in sequence, and as exported."""
        if not self.network:
            return {}
        found = {
            "sum": {name: total for name in (OURS, *self.setting.baselines) if (total := self.total(name))},
            "sequence": {name: self.whole[name] for name in (OURS, "onnxruntime") if name in self.whole},
            "exported": {
                name: [share * seconds for seconds in self.whole[as_exported(name)]]
                for name, share in self.shares.items()
            },
        }
        return {what: times for what, times in found.items() if OURS in times}

    @property
    def waiting(self) -> dict[str, float]:
        """Our median in sequence over two sums of the layers' times.

        Those of layers run alone, again and again, whose filters stay in the caches; and those on record, whose filters
        were cold.
        """
        if OURS not in self.whole or not (alone := self.total(OURS)):
            return {}
        sequence, found = statistics.median(self.whole[OURS]), {"alone": statistics.median(alone)}
        if all(row.recorded for row in self.rows):
            found["recorded"] = sum(row.repeat * (row.recorded or 0.0) for row in self.rows)
        return {what: sequence / seconds for what, seconds in found.items()}

    @property
    def incomplete(self) -> list[str]:
        """Why this counts for nothing; empty when every baseline took part in every layer, at its default settings."""
        setting = self.setting
        reasons = [
            f"{baseline.label} did not take part" + (f": {', '.join(missing)} not installed" if missing else "")
            for baseline in ALL_BASELINES.values()
            if baseline.takes(setting.direction, setting.constant, setting.dtype)
            and baseline.name not in setting.baselines
            for missing in [baseline.missing()]
        ]
        reasons += [f"{row.name}: {name}: {why}" for row in self.rows for name, why in row.failures.items()]
        if setting.restrictions:
            held = " ".join(f"{name}={value}" for name, value in setting.restrictions.items())
            reasons.append(f"torch is not at its default settings ({held}), and the others have no such settings")
        if self.interrupted or len(self.rows) < self.layers:
            why = "interrupted" if self.interrupted else "ended"
            reasons.append(f"{why} after {len(self.rows)} of {self.layers} layers")
        return reasons

    @property
    def left_out(self) -> list[str]:
        """The layers that a baseline is not compared on, and why."""
        return [f"{row.name}: {name}: {why}" for row in self.rows for name, why in row.unable.items()]
