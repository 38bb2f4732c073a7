"""Choosing an option for each of many, where what one costs depends on what others chose: exactly.

The problem is a partitioned Boolean quadratic one (PBQP): every variable has a vector of costs, every edge between two
of them a matrix. Variables with at most two edges are eliminated, which leaves the least total as it is (reductions R0,
RI and RII: Scholz and Eckstein, "Register allocation for irregular architectures", 2002); over the rest the search
branches, instead of guessing (RN). That layouts of a network can be chosen so is due to Anderson and Gregg, "Optimal
DNN primitive selection with partitioned Boolean quadratic programming", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

MOST_BRANCHES = 4096  # after which the best until then has to do; networks need a few, or none


def least(costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray]) -> list[int]:
    """The option of every variable by which the sum of all costs is least.

    Parameters
    ----------
    costs : sequence of array
        Of every variable, the cost of each option; infinite where it is impossible. The first options together have to
        be possible.
    edges : mapping of (int, int) to array
        Of pairs of variables, the first below the second: the cost of each option of one with each of the other.

    Returns
    -------
    list of int
        The best there are; where a search among variables of three edges and more took too many branches, the best
        that was found, which costs no more than the first options.

    Examples
    --------
    >>> either = np.array([0.0, 3.0])
    >>> same = np.array([[0.0, np.inf], [np.inf, 0.0]])
    >>> least([either, np.array([5.0, 1.0])], {(0, 1): same})
    [1, 1]
    """
    variables = {n: np.asarray(cost, float) for n, cost in enumerate(costs)}
    beside: dict[int, dict[int, np.ndarray]] = {n: {} for n in variables}
    for (a, b), matrix in edges.items():
        beside[a][b], beside[b][a] = matrix, matrix.T
    first = dict.fromkeys(variables, 0)
    search = _Search(_total(first, variables, beside), first)
    search.go(_Problem(variables, beside), {})  # which empties both
    return [search.chosen[n] for n in range(len(costs))]


def _total(chosen: Mapping[int, int], costs: Mapping[int, np.ndarray], beside: Mapping[int, _Row]) -> float:
    own = sum(costs[n][option] for n, option in chosen.items())
    return float(own + sum(m[chosen[n], chosen[o]] for n, row in beside.items() for o, m in row.items() if n < o))


_Row = dict[int, np.ndarray]  # of a variable: its matrices with others, whose rows are its own options


@dataclass
class _Problem:
    """Variables that are left, and those that were eliminated, with what decides over them afterwards."""

    costs: dict[int, np.ndarray]
    beside: dict[int, _Row]
    eliminated: list[tuple[int, np.ndarray, _Row]] = field(default_factory=list)

    def without(self, n: int, option: int) -> _Problem:
        """What is left when one variable has been decided on."""
        costs = {other: cost for other, cost in self.costs.items() if other != n}
        for other, matrix in self.beside[n].items():
            costs[other] = costs[other] + matrix[option]
        beside = {
            other: {another: matrix for another, matrix in row.items() if another != n}
            for other, row in self.beside.items()
            if other != n
        }
        return _Problem(costs, beside)

    def reduce(self) -> float:
        """Eliminate all that have at most two edges, one after the other; the cost that this settles."""
        settled, ready = 0.0, [n for n, row in self.beside.items() if len(row) <= 2]
        while ready:
            n = ready.pop()
            if n not in self.costs or len(self.beside[n]) > 2:
                continue
            cost, row = self.costs.pop(n), self.beside.pop(n)
            self.eliminated.append((n, cost, row))
            for other in row:
                del self.beside[other][n]
            if not row:  # R0
                settled += float(cost.min())
            elif len(row) == 1:  # RI
                ((other, matrix),) = row.items()
                self.costs[other] = self.costs[other] + (cost[:, None] + matrix).min(axis=0)
            else:  # RII
                (a, with_a), (b, with_b) = row.items()
                both = (cost[:, None, None] + with_a[:, :, None] + with_b[:, None, :]).min(axis=0)
                self.beside[a][b] = self.beside[a].get(b, 0.0) + both
                self.beside[b][a] = self.beside[a][b].T
            ready += [other for other in row if len(self.beside[other]) <= 2]
        return settled

    def bound(self) -> float:
        """No choice for what is left costs less."""
        edges = sum(matrix.min() for n, row in self.beside.items() for other, matrix in row.items() if n < other)
        return float(sum(cost.min() for cost in self.costs.values()) + edges)

    def decide(self, chosen: dict[int, int]) -> None:
        """Options of the variables that were eliminated, when all others have theirs."""
        for n, cost, row in reversed(self.eliminated):
            chosen[n] = int(np.argmin(cost + sum(matrix[:, chosen[other]] for other, matrix in row.items())))


@dataclass
class _Search:
    """The best choice until now."""

    least: float
    chosen: dict[int, int]
    branches: int = 0

    def go(self, problem: _Problem, decided: Mapping[int, int], spent: float = 0.0) -> bool:
        """Look for a better one with what has been decided at such a cost; whether there was one."""
        spent += problem.reduce()
        if spent + problem.bound() >= self.least:
            return False
        if not problem.costs:
            self.least, self.chosen = spent, dict(decided)
            problem.decide(self.chosen)
            return True
        n = max(problem.beside, key=lambda n: len(problem.beside[n]))
        better = False
        for option in map(int, np.argsort(problem.costs[n], kind="stable")):
            self.branches += 1
            if self.branches > MOST_BRANCHES:
                break
            cost = float(problem.costs[n][option])
            better |= self.go(problem.without(n, option), {**decided, n: option}, spent + cost)
        if better:
            problem.decide(self.chosen)
        return better
