"""The search: which candidates of a grid are timed next, and when enough have been."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from autoconv.algorithm import Candidate
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts
from autoconv.tuning.search.surrogate import Costs, kind

SEEDS = 12  # candidates that are timed before any is chosen for what others took
BLOCK = 4  # of those chosen next
MOST = 18  # timed for one kind of caller, ...
MOST_EXACT = 9  # ... and for one who wants exact algorithms alone
PROMISING = 1.5  # times the best so far: what is predicted to take longer ends the search
STEPS = 3  # candidates nearest to the winner that are timed in the end, whatever is predicted of them
SURELY = 1.25  # times as long as another that no limit refuses before it: so wrong two estimates may be

# Kinds of callers, of each of which the best candidate is looked for.
CALLERS = (Limits(weights="constant"), Limits(weights="varying"), Limits(weights="constant", exact=True))


class Search:
    """Finds the best of a grid for every kind of caller, by timing a part of it.

    The first block has candidates of every kind that a caller's limits may ask for. Every next one has those that the
    surrogate then finds the most promising, until none is left that could win, or as many as `MOST` have been timed.
    Then come a few steps around the winner, one to every other kind (another schedule, say, whose estimates may err all
    together), and again where there is another winner.

    Parameters
    ----------
    expected : mapping of Candidate to Facts
        What the grid's algorithms predict.
    exact : collection of str
        The names of the algorithms that merely reorder sums.
    known : mapping of Candidate to Facts
        What is measured already, of the grid and of others, which a newcomer has to beat.
    """

    def __init__(
        self, expected: Mapping[Candidate, Facts], exact: Collection[str], known: Mapping[Candidate, Facts]
    ) -> None:
        self._expected, self._exact = expected, exact
        self._costs = Costs(expected)
        self._found: dict[Candidate, Facts] = {}
        self._surrounded: set[Candidate] = set()  # winners around which there were steps
        self._blocks = self._chosen()
        self.learn(known)

    def learn(self, facts: Mapping[Candidate, Facts]) -> None:
        """Take note of what was measured; what is unreached is not known, unless there is no memory for it."""
        for candidate, found in facts.items():
            if not found.unreached or found.starved:
                self._found[candidate] = found
            if found.timed and candidate in self._expected:
                self.recall(candidate, self._expected[candidate], found)

    def recall(self, candidate: Candidate, expected: Facts, found: Facts, weight: float = 1.0) -> None:
        """Take note of what a candidate took, be it on another layer, where `expected` was predicted of it."""
        self._costs.learn(candidate, expected, found, weight)

    def next(self) -> list[Candidate]:
        """The candidates to time next; none when the search is over."""
        return next(self._blocks, [])

    def _chosen(self) -> Iterator[list[Candidate]]:
        if seeds := self._seeds():
            yield seeds
        while block := self._promising() or self._around_the_winners():
            yield block

    def _seeds(self) -> list[Candidate]:
        """The most promising of every family, those that a caller's limits may ask for, and others unlike them."""
        ranked = self._ranked(CALLERS[0])
        kinds = {(c.algorithm, self._expected[c].error, self._expected[c].packed > 0): c for c in reversed(ranked)}
        first = set({candidate.algorithm: candidate for candidate in reversed(ranked)}.values())
        asked = [c for c in kinds.values() if c in first or not self._undercut(c, kinds.values())]
        seeds = self._new(asked)
        return seeds + self._costs.run.spread(self._new(ranked), SEEDS - len(seeds), seeds)

    def _undercut(self, candidate: Candidate, others: Iterable[Candidate]) -> bool:
        """Whether one of some others is predicted to be quicker for every kind of caller, under any limits."""
        serves = [caller for caller in CALLERS if self._serves(candidate, caller)]
        own = self._expected[candidate]
        for other in others:
            its = self._expected[other]
            if (
                its.error <= own.error
                and its.workspace <= own.workspace
                and its.workspace + its.packed <= own.workspace + own.packed
                and all(self._serves(other, caller) for caller in serves)
                and all(SURELY * caller.cost(its) <= caller.cost(own) for caller in serves)
            ):
                return True
        return False

    def _new(self, candidates: list[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if candidate not in self._found]

    def _promising(self) -> list[Candidate]:
        """For each kind of caller in turn the most promising that could win."""
        block: list[Candidate] = []
        for caller in CALLERS:
            timed = [c for c in self._found if c in self._expected and self._serves(c, caller)]
            left = min((MOST_EXACT if caller.exact else MOST) - len(timed), BLOCK)
            bound = PROMISING * self._best(caller)[1]
            costs = self._costs.of(caller)
            ranked = [c for c in self._new(self._ranked(caller)) if costs[c] <= bound]
            block += self._costs.run.spread(ranked, left - sum(self._serves(c, caller) for c in block), block)
        return block

    def _around_the_winners(self) -> list[Candidate]:
        """The nearest to each winner that are new, and the nearest of every other kind that could win."""
        steps: dict[Candidate, None] = {}
        for caller in CALLERS:
            winner, least = self._best(caller)
            if winner is not None and winner in self._expected and winner not in self._surrounded:
                self._surrounded.add(winner)
                near = self._costs.run.nearness(winner)
                nearest = self._new(sorted(near, key=lambda c: (-near[c], str(c))))
                costs = self._costs.of(caller)
                others = {kind(c): c for c in reversed(nearest) if costs[c] <= PROMISING * least}
                others.pop(kind(winner), None)
                steps |= dict.fromkeys([*nearest[:STEPS], *others.values()])
        return list(steps)

    def _best(self, caller: Limits) -> tuple[Candidate | None, float]:
        """Who is best for a kind of caller so far, with its cost."""
        costs = {c: caller.cost(f) for c, f in self._found.items() if f.timed and self._serves(c, caller)}
        best = min(costs, key=costs.__getitem__, default=None)
        return best, math.inf if best is None else costs[best]

    def _ranked(self, caller: Limits) -> list[Candidate]:
        """The grid's candidates that serve a caller, the most promising first."""
        costs = self._costs.of(caller)
        return sorted((c for c in costs if self._serves(c, caller)), key=costs.__getitem__)

    def _serves(self, candidate: Candidate, caller: Limits) -> bool:
        return not caller.exact or candidate.algorithm in self._exact
