"""The choice of options for a whole: as good as any, by trying all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoconv.networks.choice import solver
from autoconv.networks.choice.solver import least


def total(chosen: list[int], costs: list[np.ndarray], edges: dict[tuple[int, int], np.ndarray]) -> float:
    own = sum(cost[n] for cost, n in zip(costs, chosen, strict=True))
    return float(own + sum(matrix[chosen[a], chosen[b]] for (a, b), matrix in edges.items()))


def drawn(seed: int, variables: int, density: float) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """A problem some of whose options are impossible, beside or without each other."""
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 9, rng.integers(1, 4)).astype(float) for _ in range(variables)]
    edges = {}
    for a, b in itertools.combinations(range(variables), 2):
        if rng.random() < density:
            matrix = rng.integers(0, 9, (len(costs[a]), len(costs[b]))).astype(float)
            matrix[rng.random(matrix.shape) < 0.3] = np.inf
            matrix[0, 0] = 4.0
            edges[a, b] = matrix
    return costs, edges


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.sampled_from([0.2, 0.5, 1.0]))
def test_no_choice_costs_less(seed: int, variables: int, density: float) -> None:
    costs, edges = drawn(seed, variables, density)
    every = itertools.product(*(range(len(cost)) for cost in costs))
    assert total(least(costs, edges), costs, edges) == min(total(list(one), costs, edges) for one in every)


def test_a_long_chain_needs_no_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "MOST_BRANCHES", 0)
    change = np.array([[0.0, 1.0], [1.0, 0.0]])
    wishes = [n // 10 % 2 for n in range(400)]  # ten of a kind together, of which one change costs as much as eleven
    costs = [np.array([wish / 11, (1 - wish) / 11]) for wish in wishes]
    edges = {(n, n + 1): change for n in range(399)}
    assert least(costs, edges) == [0] * 400
    assert least([3 * cost for cost in costs], edges) == wishes


def test_what_takes_too_long_is_no_worse_than_the_first_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "MOST_BRANCHES", 3)
    for seed in range(30):
        costs, edges = drawn(seed, 12, 1.0)
        assert total(least(costs, edges), costs, edges) <= total([0] * 12, costs, edges)


def test_equals_stay_with_the_first() -> None:
    same = np.array([[0.0, np.inf], [np.inf, 0.0]])
    assert least([np.zeros(2)] * 5, dict.fromkeys(itertools.combinations(range(5), 2), same)) == [0] * 5
