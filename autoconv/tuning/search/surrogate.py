"""A surrogate of the clock: what candidates are estimated at, corrected by how wrong estimates of their like were.

An estimate errs in the same direction for candidates that are alike: what it leaves out they have in common. So the
logarithm of the ratio of measured to estimated seconds is averaged over the measured candidates of a family, each
weighted by how near its parameters are (Nadaraya, "On Estimating Regression", 1964; Watson, "Smooth Regression
Analysis", 1964), and every new measurement corrects what is predicted of its neighbours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoconv.algorithm import Candidate
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts

PRIOR = 0.3  # the weight of a family's mean ratio, against 1 for a measurement of the candidate itself
EXTENT = 1.5  # a tile's extents decide more than other numbers: points, errors and register tiles follow from them
APART = 2.0  # between words, and between 0 ("none") and any number: as far as a number four times as large
WAVES = 4  # of a random function
ALIKE = 0.5  # nearness of two candidates of which one is enough at a time
_TILE = re.compile(r"\d+(x\d+)+")


def _coordinates(value: int | str, words: dict[str, int]) -> list[float]:
    """Where a parameter's value lies: numbers by their logarithm, words each in a place of its own."""
    if isinstance(value, int):
        return [math.log2(value) if value > 0 else -APART]
    if _TILE.fullmatch(value):
        return [EXTENT * math.log2(max(int(part), 0.5)) for part in value.split("x")]
    return [APART * words.setdefault(value, len(words))]


def kind(candidate: Candidate) -> tuple[str, ...]:
    """What no number of steps leads to: a candidate's family, its words, and which of its numbers are 0 ("none").

    >>> kind(Candidate("winograd", (("m", "4x4"), ("rows", 2), ("coop", 0))))
    ('winograd', 'some', 'some', 'none')
    """
    return candidate.algorithm, *(_part(value) for _, value in candidate.items)


def _part(value: int | str) -> str:
    if isinstance(value, str) and not _TILE.fullmatch(value):
        return value
    return "some" if value else "none"


class Space:
    """The parameters of a family's candidates as points; near is who differs little.

    Parameters
    ----------
    candidates : sequence of Candidate
        Of one family, all with the same parameters.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._words: dict[str, int] = {}
        self._names = [name for name, _ in candidates[0].items] if candidates else []
        self._points = np.array([self._point(candidate) for candidate in candidates], float)

    def _point(self, candidate: Candidate) -> list[float]:
        params = candidate.params
        return [x for name in self._names for x in _coordinates(params.get(name, 0), self._words)]

    def nearness(self, candidate: Candidate) -> Any:
        """Of every candidate to one of the family, be it of another layer: 1 for its equal, towards 0 for strangers."""
        alike = [name for name, _ in candidate.items] == self._names
        if not alike or len(place := self._point(candidate)) != self._points.shape[1]:
            return np.zeros(len(self._points))
        return np.exp(-((self._points - place) ** 2).sum(1))

    def functions(self, rng: np.random.Generator, number: int) -> Any:
        """Random functions over the candidates, of mean 0 and variance 1; two are correlated as far as they are near.

        Sums of a few random waves (Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", 2007).
        """
        found = np.zeros((len(self._points), number))
        for _ in range(WAVES):
            slopes = math.sqrt(2) * rng.standard_normal((self._points.shape[1], number))
            phases = rng.uniform(0, 2 * math.pi, number)
            found += np.cos(np.einsum("pd,dn->pn", self._points, slopes) + phases)  # BLAS would leave threads spinning
        return math.sqrt(2 / WAVES) * found


class Surrogate:
    """Predicted seconds of every candidate.

    Parameters
    ----------
    estimates : mapping of Candidate to float
        Seconds.

    Examples
    --------
    >>> near, far = (Candidate("gemm", (("TK", n),)) for n in (4, 64))
    >>> clock = Surrogate({near: 1.0, far: 1.0})
    >>> clock.learn(near, 1.0, 2.0)
    >>> clock.predictions()[near], clock.predictions()[far]
    (2.0, 2.0)
    >>> clock.learn(far, 1.0, 1.0)
    >>> clock.predictions()[near] > 1.5 > clock.predictions()[far]
    True
    """

    def __init__(self, estimates: Mapping[Candidate, float]) -> None:
        families: dict[str, list[Candidate]] = {}
        for candidate in estimates:
            families.setdefault(candidate.algorithm, []).append(candidate)
        self._families = {name: _Family(members, estimates) for name, members in families.items()}

    def learn(self, candidate: Candidate, estimate: float, measured: float, weight: float = 1.0) -> None:
        """Take note of a measurement.

        Parameters
        ----------
        candidate : Candidate
            Of this layer, or of one like it.
        estimate, measured : float
            Seconds, on that layer.
        weight : float
            What it counts; less than 1 on another layer.
        """
        if candidate.algorithm in self._families and estimate > 0 and measured > 0:
            self._families[candidate.algorithm].learn(candidate, math.log(measured / estimate), weight)

    def predictions(self) -> dict[Candidate, float]:
        """Seconds of every candidate; a family of which nothing was measured errs as the others do on average."""
        families = self._families.values()
        weight = sum(family.weight for family in families)
        usual = sum(family.sum for family in families) / weight if weight else 0.0
        return {c: seconds for family in families for c, seconds in family.predictions(usual).items()}

    def nearness(self, candidate: Candidate) -> dict[Candidate, float]:
        """How near those of its family are to a candidate, from 0 to 1; there may be none."""
        family = self._families.get(candidate.algorithm)
        if family is None:
            return {}
        return dict(zip(family.members, family.space.nearness(candidate).tolist(), strict=True))

    def spread(self, ranked: Sequence[Candidate], number: int, others: Sequence[Candidate] = ()) -> list[Candidate]:
        """The first of some candidates that resemble neither each other nor certain others.

        Parameters
        ----------
        ranked : sequence of Candidate
            The best first.
        number : int
            How many are wanted.
        others : sequence of Candidate

        Returns
        -------
        list of Candidate
        """
        chosen: list[Candidate] = []
        near = {candidate for other in others for candidate in self._like(other)}
        for candidate in ranked:
            if len(chosen) >= number:
                break
            if candidate not in near:
                chosen.append(candidate)
                near |= self._like(candidate)
        return chosen

    def _like(self, candidate: Candidate) -> set[Candidate]:
        return {other for other, near in self.nearness(candidate).items() if near > ALIKE}


class Costs:
    """What candidates are predicted to cost, from what their algorithms expect and what was measured.

    Parameters
    ----------
    expected : mapping of Candidate to Facts
    """

    def __init__(self, expected: Mapping[Candidate, Facts]) -> None:
        self.run = Surrogate({candidate: facts.time for candidate, facts in expected.items()})
        self.pack = Surrogate({candidate: facts.pack for candidate, facts in expected.items()})

    def learn(self, candidate: Candidate, expected: Facts, found: Facts, weight: float = 1.0) -> None:
        """Take note of what a candidate took, be it on another layer, where `expected` was predicted of it.

        Parameters
        ----------
        candidate : Candidate
        expected, found : Facts
        weight : float
            What it counts; less than 1 on another layer.
        """
        self.run.learn(candidate, expected.time, found.time, weight)
        self.pack.learn(candidate, expected.pack, found.pack, weight)

    def of(self, caller: Limits) -> dict[Candidate, float]:
        """Predicted seconds that count for a caller, of every candidate."""
        run = self.run.predictions()
        if caller.weights == "constant":
            return run
        pack = self.pack.predictions()
        return {candidate: seconds + pack[candidate] for candidate, seconds in run.items()}


class _Family:
    """What was learned of one family."""

    def __init__(self, members: list[Candidate], estimates: Mapping[Candidate, float]) -> None:
        self.members, self.space = members, Space(members)
        self._estimates = np.array([estimates[candidate] for candidate in members])
        self._sums, self._weights = np.zeros(len(members)), np.zeros(len(members))
        self.sum = self.weight = 0.0

    def learn(self, candidate: Candidate, logarithm: float, weight: float) -> None:
        near = weight * self.space.nearness(candidate)
        self._sums += near * logarithm
        self._weights += near
        self.sum += weight * logarithm
        self.weight += weight

    def predictions(self, usual: float) -> dict[Candidate, float]:
        mean = self.sum / self.weight if self.weight else usual
        corrections = (self._sums + PRIOR * mean) / (self._weights + PRIOR)
        return dict(zip(self.members, (self._estimates * np.exp(corrections)).tolist(), strict=True))
