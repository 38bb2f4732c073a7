"""What is on record of a network's layers, gathered to be drawn: nothing is timed for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoconv.common.candidate import Candidate
from autoconv.common.text import one_line
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks import Network
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits, ranking
from autoconv.records.schema import Facts
from autoconv.registry import algorithms
from autoconv.tuning.choice import TIMING
from autoconv.tuning.lookup import Request
from autoconv.tuning.planner import plan

PLAIN_GEMM = "numpy.gemm"  # im2col and NumPy's matrix product


def family_of(candidate: Candidate) -> str:
    """The family that a candidate's algorithm belongs to, such as "winograd" of "winograd.polyphase"."""
    return candidate.algorithm.partition(".")[0]


@dataclass(frozen=True, eq=False)
class Studied:
    """A layer of a network, and every candidate of it that was timed.

    Attributes
    ----------
    name : str
    layer : ConvLayer
    repeat : int
        How many equal ones the network has.
    device : CPU
    limits : Limits
    winner : Candidate
        The best under the limits.
    facts : dict of Candidate to Facts
        Of those timed, other libraries among them.
    ranking : tuple of Candidate
        Those that the limits allow, best first.
    cut_short : bool
        Whether a budget ended before every candidate's turn.
    """

    name: str
    layer: ConvLayer
    repeat: int
    device: CPU
    limits: Limits
    winner: Candidate
    facts: Mapping[Candidate, Facts]
    ranking: tuple[Candidate, ...]
    cut_short: bool = False

    def seconds(self, candidate: Candidate) -> float:
        """What a candidate takes, with packing where filters vary."""
        return self.limits.cost(self.facts[candidate])

    @property
    def best(self) -> float:
        """What the winner takes."""
        return self.seconds(self.winner)

    @property
    def title(self) -> str:
        """Its name, and how often the network has it."""
        return f"{self.name}\N{NO-BREAK SPACE}×{self.repeat}" if self.repeat > 1 else self.name

    @functools.cached_property
    def fastest(self) -> dict[str, Candidate]:
        """The fastest candidate of every algorithm, the fastest algorithm first."""
        return self._fastest_among(self.facts)

    @functools.cached_property
    def fastest_allowed(self) -> dict[str, Candidate]:
        """Likewise, of those that the limits allow, and of other libraries, be they allowed or not."""
        facts = self.facts.items()
        return self._fastest_among(
            c for c, found in facts if found.vendor is not None or not self.limits.why_not(found)
        )

    def _fastest_among(self, candidates: Iterable[Candidate]) -> dict[str, Candidate]:
        found: dict[str, Candidate] = {}
        for candidate in sorted(candidates, key=self.seconds):
            found.setdefault(candidate.algorithm, candidate)
        return found

    def fastest_of(self, which: Callable[[Candidate], bool]) -> Candidate | None:
        """The fastest candidate of those that a function names."""
        return next((candidate for candidate in self.fastest.values() if which(candidate)), None)

    def under(self, limits: Limits) -> float | None:
        """What the best takes under other limits; None where nothing that was timed keeps to them."""
        order = ranking(self.facts, limits, self.layer.bytes)
        return self.limits.cost(self.facts[order[0]]) if order else None


@dataclass(frozen=True, eq=False)
class Study:
    """The layers of a network of which there are records on a device.

    Attributes
    ----------
    network, source : str
    batch : int
    direction : str
    device : CPU
    limits : Limits
    layers : tuple of Studied
        In the network's order.
    missing : dict of str to str
        Why the others are not among them, by their names.
    when : str
        The date of the newest race.
    """

    network: str
    source: str
    batch: int
    direction: str
    device: CPU
    limits: Limits
    layers: tuple[Studied, ...]
    missing: Mapping[str, str]
    when: str

    @property
    def seconds(self) -> float:
        """All layers by their winners, repeats counted."""
        return sum(studied.repeat * studied.best for studied in self.layers)

    @property
    def flops(self) -> int:
        """Operations of the direct sums, likewise."""
        return sum(studied.repeat * studied.layer.flops for studied in self.layers)

    @property
    def peak(self) -> float:
        """Operations per second that the machine was measured to do at most, in the type of the first layer."""
        return self.device.peak_flops(self.layers[0].layer.dtype)

    @property
    def families(self) -> list[str]:
        """Those that take part, those that win most time first."""
        won = dict.fromkeys((family_of(candidate) for each in self.layers for candidate in each.facts), 0.0)
        for each in self.layers:
            won[family_of(each.winner)] += each.repeat * each.best
        return sorted(won, key=lambda family: (-won[family], family))

    def every(self) -> Iterator[tuple[Studied, Candidate, Facts]]:
        """All candidates that were timed, layer by layer."""
        for studied in self.layers:
            for candidate, facts in studied.facts.items():
                yield studied, candidate, facts

    def total(self, seconds: Callable[[Studied], float | None]) -> float | None:
        """A sum over the layers, repeats counted; None where a layer has none."""
        found = [(studied.repeat, seconds(studied)) for studied in self.layers]
        return None if any(s is None for _, s in found) else sum(repeat * (s or 0.0) for repeat, s in found)

    @property
    def plain_gemm(self) -> float | None:
        """All layers by im2col and NumPy's matrix product; None unless that was timed for each."""
        return self.total(_by(lambda candidate: candidate.algorithm == PLAIN_GEMM))

    def under(self, **changes: Any) -> float | None:
        """All layers, each by the best under other limits; None where a layer has nothing that keeps to them."""
        limits = replace(self.limits, **changes)
        return self.total(lambda studied: studied.under(limits))


def _by(which: Callable[[Candidate], bool]) -> Callable[[Studied], float | None]:
    def seconds(studied: Studied) -> float | None:
        found = studied.fastest_of(which)
        return None if found is None else studied.seconds(found)

    return seconds


def exact_algorithms(device: CPU) -> frozenset[str]:
    """Those of our own that do no more to a sum than reorder it."""
    return frozenset(a.name for a in algorithms(device) if a.exact and not a.name.startswith("numpy."))


def gather(
    net: Network, batch: int, direction: str, device: CPU, cache: TuningCache, options: Mapping[str, Any]
) -> Study:
    """What is on record of every layer of a network.

    Parameters
    ----------
    net : Network
    batch : int
    direction : "fwd", "dgrad" or "wgrad"
        Of the layers that state no others of their own.
    device : CPU
    cache : TuningCache
    options : mapping
        Limits, as `plan` takes them.

    Returns
    -------
    Study

    Raises
    ------
    PlanError
        When no layer has a record that answers under the limits.
    """
    layers, missing, when = [], {}, ""
    for named in net.layers:
        layer = named.at(*net.stated(named, batch, direction))
        try:
            found = studied(named.name, named.repeat, layer, device, cache, {**options, "mode": "cached"})
        except PlanError as error:
            missing[named.name] = one_line(error)
            continue
        layers.append(found)
        records = filter(None, (cache.load(layer.key(), key) for key in (device.key, *device.lesser_keys)))
        when = max([when, *(race.when for record in records for race in record.races)])
    if not layers:
        name, why = next(iter(missing.items()))
        raise PlanError(
            f"{net.name}, batch {batch}, {direction}: no layer has a record that answers, tune the network first; "
            f"{name}: {why}"
        )
    limits = layers[0].limits
    return Study(net.name, net.source, batch, direction, device, limits, tuple(layers), missing, when)


def studied(
    name: str, repeat: int, layer: ConvLayer, device: CPU, cache: TuningCache, options: Mapping[str, Any]
) -> Studied:
    """A layer by its plan, with what other libraries were measured to take, be they allowed or not.

    Parameters
    ----------
    name : str
    repeat : int
        How many equal ones there are.
    layer : ConvLayer
    device : CPU
    cache : TuningCache
    options : mapping
        As `plan` takes them, `mode` among them.

    Returns
    -------
    Studied

    Raises
    ------
    PlanError
        As `plan` does, and where no time of what it chooses is on record.
    """
    chosen = plan(layer, device=device, cache=cache, build=False, **options)
    facts = {Candidate.parse(text): found for text, found in chosen.facts.items() if found.timed}
    if chosen.candidate not in facts:
        needed = "a larger budget" if options["mode"] in TIMING and chosen.cut_short else "a mode that times"
        raise PlanError(f"mode={options['mode']!r}: no time of {chosen.candidate} is on record: expected {needed}")
    record = cache.load(layer.key(), device.key)
    if record is not None:
        asked = Request(layer, device, cache, chosen.limits, None, False, None)  # so that all times are on one clock
        known = record.facts(asked.unchanged).items()
        facts |= {candidate: found for candidate, found in known if found.timed and found.vendor is not None}
    ranked = tuple(map(Candidate.parse, chosen.ranking))
    return Studied(name, layer, repeat, device, chosen.limits, chosen.candidate, facts, ranked, chosen.cut_short)
