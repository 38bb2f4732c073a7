"""Which candidates a device has for a layer: who can run it, how fast and how large they expect to be."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from autoconv.algorithm import Algorithm, Candidate
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.records.schema import Facts, Limits

HOPELESS = 12.0  # times the best estimate; estimates are within a factor of 3 or so of the truth


class Survey:
    """Every candidate of a device for a layer, with the reasons against those that cannot run.

    Attributes
    ----------
    candidates : dict of Candidate
        All of them, by name.
    reasons : dict of lists of str
        Why some cannot run.
    spared : dict of lists of str
        Why some of those that can are not worth timing, unless asked for by name: their better self can
        run too, or estimates put them hopelessly behind. Those that take all layers are never spared, as they
        are there under any limits.
    """

    def __init__(
        self,
        layer: ConvLayer,
        device: Device,
        algorithms: Sequence[Algorithm[Any]],
        vendors: frozenset[str] | None,
    ) -> None:
        self.layer, self.device, self.vendors = layer, device, vendors
        self.algorithms = {algorithm.name: algorithm for algorithm in algorithms}
        self.candidates: dict[str, Candidate] = {}
        self.reasons: dict[str, list[str]] = {}
        for algorithm in algorithms:
            against = self._vendor_reasons(algorithm)
            outside = algorithm.unsupported(layer)
            offered = [] if outside or (against and algorithm.asks_vendor) else algorithm.all(layer, device)
            if not offered:  # not silent: who asks why it did not win finds it here
                self.candidates[algorithm.name] = Candidate(algorithm.name)
                self.reasons[algorithm.name] = [*against, *outside] or ["it has no candidate for such a layer"]
            for candidate in offered:
                name = str(candidate)
                self.candidates[name] = candidate
                reasons = list(against)
                if not reasons or algorithm.loaded() or not algorithm.installed():  # else asking could load a library
                    reasons += algorithm.why_not(layer, device, candidate.params)
                if reasons:
                    self.reasons[name] = reasons
        self.spared = self._spared()

    def algorithm(self, name: str) -> Algorithm[Any]:
        """The algorithm of a candidate."""
        return self.algorithms[self.candidates[name].algorithm]

    @functools.cached_property
    def expected(self) -> dict[str, Facts]:
        """What the algorithms themselves predict of the candidates that can run."""
        found = {}
        for name, candidate in self.candidates.items():
            if name in self.reasons:
                continue
            algorithm, params = self.algorithm(name), candidate.params
            packed = algorithm.packed_bytes(self.layer, self.device, params)
            found[name] = Facts(
                version=algorithm.version,
                time=algorithm.estimate(self.layer, self.device, params),
                pack=2 * packed / self.device.bandwidth(),  # the filters stream in, the packed ones out
                workspace=algorithm.workspace_bytes(self.layer, self.device, params),
                packed=packed,
                error=algorithm.bound(self.layer, params),
                deterministic=algorithm.deterministic,
                tf32=algorithm.tf32,
                vendor=algorithm.vendor,
            )
        return found

    def promising(self, limits: Limits | None = None) -> list[str]:
        """Those worth timing, least estimate first; with limits, those that satisfy them as far as is known."""
        return [name for name in self.runnable(limits) if name not in self.spared]

    def runnable(self, limits: Limits | None = None) -> list[str]:
        """Those that can run, likewise."""
        cost = (limits or Limits()).cost
        names = sorted(self.expected, key=lambda name: (cost(self.expected[name]), name))
        return names if limits is None else [name for name in names if not limits.why_not(self.expected[name])]

    def _vendor_reasons(self, algorithm: Algorithm[Any]) -> list[str]:
        if algorithm.vendor is None or self.vendors is None or algorithm.vendor in self.vendors:
            return []
        return [f"{algorithm.vendor} is not among the vendors allowed (installed, loaded: see vendors=)"]

    def _spared(self) -> dict[str, list[str]]:
        expected = self.expected.values()
        least_run = min((facts.time for facts in expected), default=0.0)
        least_both = min((facts.time + facts.pack for facts in expected), default=0.0)
        spared = {}
        for name, facts in self.expected.items():
            algorithm = self.algorithm(name)
            factor = min(facts.time / least_run, (facts.time + facts.pack) / least_both)
            if any(algorithm.stands_in_for == self.candidates[other].algorithm for other in self.expected):
                spared[name] = [f"stands in for {algorithm.stands_in_for}, which runs this layer itself"]
            elif factor > HOPELESS and not algorithm.takes_all:
                spared[name] = [f"estimated at {factor:.0f} times the least estimate"]
        return spared


@functools.cache
def fingerprint(algorithms: tuple[Algorithm[Any], ...], vendors: frozenset[str]) -> tuple[str, frozenset[str]]:
    """What decides the outcome of a survey: the algorithms of our own, and the vendors' by name.

    A record that covers every candidate of a survey notes it, so that the next process need not survey
    again. What covers some vendors covers also a survey of fewer.
    """
    own = [f"{a.name}={a.version}" for a in algorithms if a.vendor is None]
    others = frozenset(f"{a.name}={a.version}" for a in algorithms if a.vendor in vendors)
    return hashlib.sha256("\n".join([str(HOPELESS), *own]).encode()).hexdigest()[:16], others


def note(algorithms: tuple[Algorithm[Any], ...], vendors: frozenset[str]) -> str:
    """The fingerprint as a race records it."""
    own, others = fingerprint(algorithms, vendors)
    return " ".join([own, *sorted(others)])


def covered(noted: str, algorithms: tuple[Algorithm[Any], ...], vendors: frozenset[str]) -> bool:
    """Whether a race that noted this covers a survey of today."""
    own, others = fingerprint(algorithms, vendors)
    first, *rest = noted.split() or [""]
    return first == own and others <= frozenset(rest)
