"""What a caller allows, asked of recorded facts, and the order of the candidates that remain."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Literal

from autoconv.algorithm import Candidate
from autoconv.records.schema import Facts

LEAST_NOISE, MOST_NOISE = 0.01, 0.03
NEGLIGIBLE = 1 / 64  # of a layer's own arrays: so little more workspace is no reason against a candidate

Weights = Literal["varying", "constant"]
Denormals = Literal["flush", "keep"]


@dataclass(frozen=True)
class Limits:
    """What a caller of `plan` allows.

    Attributes
    ----------
    workspace_limit : int or None
        Bytes.
    deterministic : bool
        Whether only bitwise repeatable candidates will do.
    tolerance : float or None
        Largest measured error, as `max|y - ref| / max(sum |x||w|)`.
    allow_tf32 : bool
        Whether float32 operands may be rounded to TF32.
    weights : "varying" or "constant"
        Whether packing the filters counts, in time and in workspace, or is done once.
    vendors : frozenset of str, or None
        The vendor libraries allowed; None allows all.
    exact : bool
        Whether only algorithms that merely reorder sums are considered. Facts do not say so: who asks them has left
        the other algorithms out.
    denormals : "flush" or "keep"
        Whether denormal operands and results may count as 0. Facts do not say so either.
    """

    workspace_limit: int | None = None
    deterministic: bool = False
    tolerance: float | None = None
    allow_tf32: bool = False
    weights: Weights = "varying"
    vendors: frozenset[str] | None = None
    exact: bool = False
    denormals: Denormals = "flush"

    def __str__(self) -> str:
        """Those that are set, as in a call."""
        plain = [f for f in fields(self) if f.name != "vendors" and getattr(self, f.name) != f.default]
        named = [f"{f.name}={getattr(self, f.name)!r}" for f in plain]
        named += [f"with {' and '.join(sorted(self.vendors))}"] if self.vendors else []
        return ", ".join(named) or "no limits"

    def why_not(self, facts: Facts) -> list[str]:
        """Every reason against a candidate with these facts; empty when it is allowed."""
        if facts.failure is not None:
            return [facts.failure]
        reasons = []
        workspace = self.workspace(facts)
        if self.workspace_limit is not None and workspace > self.workspace_limit:
            reasons.append(f"it needs {workspace} bytes of workspace; the limit is {self.workspace_limit}")
        if self.deterministic and not facts.deterministic:
            reasons.append("it is not deterministic")
        if self.tolerance is not None and facts.error > self.tolerance:
            reasons.append(f"its error of {facts.error:.1e} is over the tolerance of {self.tolerance:.1e}")
        if facts.tf32 and not self.allow_tf32:
            reasons.append("it rounds to TF32, which is not allowed")
        if not self.allows(facts.vendor):
            reasons.append(f"it calls {facts.vendor}, which is not allowed")
        return reasons

    def allows(self, vendor: str | None) -> bool:
        """Whether candidates may be used that call this vendor library; our own (None) may always."""
        return vendor is None or self.vendors is None or vendor in self.vendors

    def cost(self, facts: Facts) -> float:
        """Seconds that count: the run, and packing where the filters vary."""
        return facts.time + (facts.pack if self.weights == "varying" else 0.0)

    def hot_cost(self, facts: Facts) -> float:
        """The same of a hot run; where it was not timed, of a cold one."""
        return self.cost(facts) + (0.0 if facts.hot is None else facts.hot - facts.time)

    def workspace(self, facts: Facts) -> int:
        """Bytes that count: of the run, and of the packed filters where they are not the caller's."""
        return facts.workspace + (facts.packed if self.weights == "varying" else 0)


def ranking(facts: Mapping[Candidate, Facts], limits: Limits, arrays: int) -> list[Candidate]:
    """The candidates that the limits allow, best first.

    The fastest and all that are within the noise of it are equally fast with cold filters; of those, the fastest with
    hot ones, as a layer that runs by itself has them, and all that are within the noise of it are equally fast. Among
    these, whose threads work on their own come first, then those of less workspace, where the difference matters beside
    the layer's own arrays, then who was faster with hot filters, then who was with cold ones, then the name. The next
    are ranked in the same way among what is left. Everything is compared with the fastest of its group only, as "within
    the noise" is not transitive.

    Parameters
    ----------
    facts : mapping of Candidate to Facts
        What was measured; who has no time is left out.
    limits : Limits
    arrays : int
        Bytes of the layer's own arrays, as `ConvLayer.bytes` has them.

    Returns
    -------
    list of Candidate
    """
    return [
        candidate
        for group in equally_fast(facts, limits)
        for equals in _equally_hot(group, facts, limits)
        for kind in (False, True)
        for candidate in _by_workspace([c for c in equals if cooperates(c) == kind], facts, limits, arrays)
    ]


def cooperates(candidate: Candidate) -> bool:
    """Whether its threads transform each other's input, a batch of chunks at a time.

    They lose what they gain, and more, while a virtual machine's processors have no cache in common.
    """
    return bool(candidate.params.get("coop"))


def equally_fast(facts: Mapping[Candidate, Facts], limits: Limits) -> Iterator[list[Candidate]]:
    """The candidates that the limits allow in groups, the fastest first: all that are within the noise of their first.

    Parameters
    ----------
    facts, limits
        As for `ranking`.

    Yields
    ------
    list of Candidate
        In the order of their time, then of their names.
    """
    costs = ((limits.cost(f), str(c), c) for c, f in facts.items() if f.timed and not limits.why_not(f))
    left = sorted(costs, key=itemgetter(0, 1))
    while left:
        best_cost, _, best = left[0]
        near = left[: bisect_right(left, best_cost * (1 + MOST_NOISE), key=itemgetter(0))]
        tied = [entry for entry in near if entry[0] <= best_cost * (1 + noise(facts[best], facts[entry[2]]))]
        yield [candidate for *_, candidate in tied]
        left = [entry for entry in near if entry not in tied] + left[len(near) :]


def _equally_hot(
    group: Sequence[Candidate], facts: Mapping[Candidate, Facts], limits: Limits
) -> Iterator[list[Candidate]]:
    """The candidates of a group in groups of their own, those first that are within the noise of the fastest when hot.

    Hot times are the least of a few samples: nothing says how certain each is, and the most noise is allowed for.
    """
    left = list(group)
    while left:
        most = min(limits.hot_cost(facts[candidate]) for candidate in left) * (1 + MOST_NOISE)
        yield [candidate for candidate in left if limits.hot_cost(facts[candidate]) <= most]
        left = [candidate for candidate in left if limits.hot_cost(facts[candidate]) > most]


def _by_workspace(
    group: Sequence[Candidate], facts: Mapping[Candidate, Facts], limits: Limits, arrays: int
) -> Iterator[Candidate]:
    """Those of a group of the least workspace, and of little more, by their hot times; then the next likewise."""
    left = list(group)
    while left:
        most = min(limits.workspace(facts[candidate]) for candidate in left) + NEGLIGIBLE * arrays
        small = [candidate for candidate in left if limits.workspace(facts[candidate]) <= most]
        yield from sorted(small, key=lambda candidate: limits.hot_cost(facts[candidate]))
        left = [candidate for candidate in left if candidate not in small]


def noise(a: Facts, b: Facts) -> float:
    """By how much two times may differ and mean nothing: the less certain of the two, within bounds."""
    return min(max(_uncertainty(a), _uncertainty(b), LEAST_NOISE), MOST_NOISE)


def _uncertainty(facts: Facts) -> float:
    """About two standard errors of the median; one or two samples have no spread to speak of.

    For normal samples the standard error of the median of n is 1.25 sigma / sqrt(n), and half the
    interquartile range is 0.67 sigma.
    """
    return 3.7 * facts.spread / math.sqrt(facts.samples) if facts.samples > 2 else MOST_NOISE
