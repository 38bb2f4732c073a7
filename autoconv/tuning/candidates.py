"""The candidate set: what a device has for a layer, who of it can run, how fast and how large they expect to be."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common.text import size
from autoconv.device import Device
from autoconv.errors import AutoconvError, PlanError
from autoconv.layer import ConvLayer
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts
from autoconv.tuning.search.shortlist import shortlist

# What an algorithm may make of parameters that are none of its own, in a record of any origin; or without its library.
DISCREDITED = (ArithmeticError, LookupError, TypeError, ValueError, AutoconvError)
FINER = 1.5  # times the least estimate: no more is paid for a smaller error
MOST_LEFT = 0.9  # of the error of what a finer form is one of
UNUSUAL = 3.0  # times the usual error: hardly a candidate errs more
PRUNE_FACTOR = 12.0  # times the least estimate; estimates are within a factor of 3 or so of the truth


class CandidateSet:
    """Every candidate of a device for a layer, with the reasons against those that cannot run.

    Parameters
    ----------
    layer : ConvLayer
    device : Device
    algorithms : sequence of Algorithm
        Those to ask for candidates.
    vendors : frozenset of str, or None
        The vendor libraries that may be used; None allows all.

    Attributes
    ----------
    candidates : list of Candidate
        All of them; an algorithm that has none for the layer stands there by its bare name.
    reasons : dict of Candidate to list of str
        Why some cannot run.

    Raises
    ------
    PlanError
        When the layer's arrays are larger than the device's memory, be it for one image.
    """

    def __init__(
        self,
        layer: ConvLayer,
        device: Device,
        algorithms: Sequence[Algorithm[Any]],
        vendors: frozenset[str] | None,
    ) -> None:
        # To list what could run may take minutes. A network runs larger layers for some images at a time.
        if (need := layer.replace(N=1).bytes) > (there := device.memory()):
            raise PlanError(
                f"{layer}: the arrays of one image take {size(need)}, and {device.name} has {size(there)} of memory"
            )
        self.layer, self.device, self._allows = layer, device, Limits(vendors=vendors).allows
        self.algorithms = {algorithm.name: algorithm for algorithm in algorithms}
        self.candidates: list[Candidate] = []
        self.reasons: dict[Candidate, list[str]] = {}
        for algorithm in algorithms:
            self._add(algorithm)

    def _add(self, algorithm: Algorithm[Any]) -> None:
        against = self._vendor_reasons(algorithm)
        outside = algorithm.unsupported(self.layer)
        offered = [] if outside or (against and algorithm.asks_vendor) else algorithm.all(self.layer, self.device)
        if not offered:  # not silent: who asks why it did not win finds it here
            bare = Candidate(algorithm.name)
            self.candidates.append(bare)
            self.reasons[bare] = [*against, *outside] or ["it has no candidate for such a layer"]
        self.candidates += offered
        for candidate in offered:
            reasons = list(against)
            if not reasons or algorithm.loaded() or not algorithm.installed():  # else asking could load a library
                reasons += algorithm.why_not(self.layer, self.device, candidate.params)
            if reasons:
                self.reasons[candidate] = reasons

    @functools.cached_property
    def expected(self) -> dict[Candidate, Facts]:
        """What the algorithms themselves predict of the candidates that can run; the others get their reasons."""
        found = {}
        for candidate in self.candidates:
            if candidate not in self.reasons:
                try:
                    found[candidate] = expected(
                        self.algorithms[candidate.algorithm], self.layer, self.device, candidate
                    )
                except AutoconvError as error:  # its workspace is as a library says, and that is missing
                    self.reasons[candidate] = [str(error)]
        return found

    @functools.cached_property
    def finer(self) -> frozenset[Candidate]:
        """The finer forms of those that can run: they are not listed, but may be asked for."""
        able = (candidate for candidate in self.candidates if candidate not in self.reasons)
        forms = (finer_form(self.algorithms[c.algorithm], self.layer, c) for c in able)
        return frozenset(form.candidate for form in forms if form is not None)

    def expectation(self, candidate: Candidate) -> Facts | None:
        """What is predicted of one of them, or of a finer form of one; None of any other."""
        if candidate not in self.expected and candidate in self.finer:
            return expected(self.algorithms[candidate.algorithm], self.layer, self.device, candidate)
        return self.expected.get(candidate)

    def against(self, candidate: Candidate) -> list[str]:
        """Why one of them cannot run; nothing is asked about the others."""
        if candidate not in self.reasons:
            try:
                expected(self.algorithms[candidate.algorithm], self.layer, self.device, candidate)
            except AutoconvError as error:
                return [str(error)]
        return self.reasons.get(candidate, [])

    def worth_timing(self, limits: Limits | None = None) -> list[Candidate]:
        """Those not pruned, least estimate first; with limits, those that satisfy them as far as is known.

        Among equals, in the order in which their family names them.
        """
        return [candidate for candidate in self.runnable(limits) if candidate not in self.pruned]

    def runnable(self, limits: Limits | None = None) -> list[Candidate]:
        """Those that can run, likewise."""
        cost, expected = (limits or Limits()).cost, self.expected
        ordered = sorted(expected, key=lambda candidate: cost(expected[candidate]))
        return ordered if limits is None else [c for c in ordered if not limits.why_not(expected[c])]

    def searched(self, candidate: Candidate) -> bool:
        """Whether it is one of a grid, of which a search times a part."""
        return candidate.algorithm in self.algorithms and self.algorithms[candidate.algorithm].searched

    def examples(self) -> list[Candidate]:
        """All candidates, but of a grid only one: the first that can run, if there is one."""
        by_family: dict[str, Candidate] = {}
        for candidate in self.candidates:
            first = by_family.setdefault(candidate.algorithm, candidate)
            if first in self.reasons and candidate not in self.reasons:
                by_family[candidate.algorithm] = candidate
        return [c for c in self.candidates if not self.searched(c) or by_family[c.algorithm] == c]

    def grid(self) -> list[Candidate]:
        """Those worth timing of which a search times a part."""
        return [candidate for candidate in self.worth_timing() if self.searched(candidate)]

    def few(self, limits: Limits, number: int) -> list[Candidate]:
        """Those worth timing under these limits among which the best is expected, at most so many.

        Then comes the first that errs less than half as much as those before, and so on: a network may need its layers
        more exact. One that is far behind is not worth it: who needs it asks for exact algorithms.
        """
        ranked = self.worth_timing(limits)
        costs = {candidate: limits.cost(self.expected[candidate]) for candidate in ranked}
        least = min(costs.values(), default=0.0)
        chosen = shortlist(costs, number)
        near = [candidate for candidate in ranked if costs[candidate] <= FINER * least]
        while chosen:
            most = min(self.expected[candidate].error for candidate in chosen) / 2
            finer = next((candidate for candidate in near if self.expected[candidate].error < most), None)
            if finer is None:
                break
            chosen.append(finer)
        return chosen

    def _vendor_reasons(self, algorithm: Algorithm[Any]) -> list[str]:
        if self._allows(algorithm.vendor):
            return []
        return [f"{algorithm.vendor} is not among the libraries that the option vendors allows"]

    @functools.cached_property
    def pruned(self) -> dict[Candidate, list[str]]:
        """Why some of those that can run are not worth timing, unless asked for by name.

        Their better self can run too, or estimates put them far behind others that no limits leave out where they are
        allowed. Those that take all layers are never pruned, as they are there under any limits.
        """
        own: dict[str, tuple[float, float]] = {}  # the least estimates of each algorithm: of a run, and with packing
        for candidate, facts in self.expected.items():
            run, both = own.get(candidate.algorithm, (math.inf, math.inf))
            own[candidate.algorithm] = min(run, facts.time), min(both, facts.time + facts.pack)
        least = {}  # of all that are allowed wherever an algorithm is
        for name in own:
            others = (own[other] for other in own if _allowed_with(self.algorithms[other], self.algorithms[name]))
            least[name] = tuple(map(min, zip(*others, strict=True)))
        pruned = {}
        for candidate, facts in self.expected.items():
            algorithm = self.algorithms[candidate.algorithm]
            run, both = least[candidate.algorithm]
            factor = min(facts.time / run, (facts.time + facts.pack) / both)
            if algorithm.stands_in_for in least:
                pruned[candidate] = [f"stands in for {algorithm.stands_in_for}, which runs this layer itself"]
            elif factor > PRUNE_FACTOR and not algorithm.takes_all:
                pruned[candidate] = [f"estimated at {factor:.0f} times the least estimate"]
        return pruned


def _allowed_with(one: Algorithm[Any], other: Algorithm[Any]) -> bool:
    """Whether no limits allow the other algorithm and leave out one."""
    return (
        one.exact >= other.exact
        and one.keeps_denormals >= other.keeps_denormals
        and one.deterministic >= other.deterministic
        and one.tf32 <= other.tf32
        and one.vendor in (None, other.vendor)
    )


def least_estimate(layer: ConvLayer, device: Device) -> float:
    """Seconds that the quickest candidate of our own algorithms is expected to take."""
    return min(facts.time for facts in CandidateSet(layer, device, registry.own(device), frozenset()).expected.values())


class FinerForm(NamedTuple):
    """What errs less than a candidate and takes little longer, and which share of the error is usually left."""

    candidate: Candidate
    share: float


def finer_form(algorithm: Algorithm[Any], layer: ConvLayer, candidate: Candidate) -> FinerForm | None:
    """The finer form of a candidate; None where there is none that would err much less."""
    if not algorithm.finer or algorithm.finer.keys() <= candidate.params.keys():
        return None
    params = {**candidate.params, **algorithm.finer}
    try:
        share = algorithm.usual_error(layer, params) / algorithm.usual_error(layer, candidate.params)
    except DISCREDITED:
        return None
    return FinerForm(Candidate(candidate.algorithm, tuple(params.items())), share) if share < MOST_LEFT else None


def expected(algorithm: Algorithm[Any], layer: ConvLayer, device: Device, candidate: Candidate) -> Facts:
    """What an algorithm itself predicts of a candidate that can run."""
    params = candidate.params
    packed = algorithm.packed_bytes(layer, device, params)
    return Facts(
        version=algorithm.version,
        time=algorithm.estimate(layer, device, params),
        pack=2 * packed / device.bandwidth(),  # the filters stream in, the packed ones out
        workspace=algorithm.workspace_bytes(layer, device, params),
        packed=packed,
        error=min(UNUSUAL * algorithm.usual_error(layer, params), algorithm.bound(layer, params)),
        deterministic=algorithm.deterministic,
        tf32=algorithm.tf32,
        vendor=algorithm.vendor,
    )
