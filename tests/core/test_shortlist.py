"""The few of many candidates among which the best is expected."""

from __future__ import annotations

import numpy as np
import pytest

from autoconv.algorithm import Candidate
from autoconv.tuning.search.shortlist import shortlist
from autoconv.tuning.search.surrogate import Space


def cut(BM: int, BN: int) -> Candidate:
    return Candidate("grid", (("BM", BM), ("BN", BN)))


def test_a_shortlist_begins_with_the_least_estimate_and_goes_on_with_those_that_err_otherwise() -> None:
    first, like, far, other = cut(4, 4), cut(5, 4), cut(64, 64), Candidate("numpy.direct")
    estimates = {like: 1.01e-3, far: 1.02e-3, other: 1.02e-3, first: 1e-3}
    assert shortlist(estimates, 4) == [first, other, far, like]
    assert shortlist(estimates, 2) == [first, other]
    assert shortlist(estimates, 0) == shortlist({}, 4) == []


def test_a_shortlist_ends_where_one_more_would_hardly_help() -> None:
    first, other = cut(4, 4), Candidate("numpy.direct")
    third = Candidate("numpy.gemm")
    lists = [shortlist({first: 1e-3, other: 1e-3, third: factor * 1e-3}, 4) for factor in (1.1, 1.3, 1.7, 9.0)]
    assert lists == [[first, other, third]] * 2 + [[first, other]] * 2
    assert shortlist({first: 1e-3, other: 9e-3}, 4) == [first, other]  # the first may fail
    assert len(shortlist({cut(n, n): 1e-3 for n in range(1, 200)}, 500)) < 30  # all alike
    many = {Candidate(f"family{n}"): 1e-3 for n in range(12)}
    assert len(shortlist(many, 8)) == 8  # all of them strangers


def test_what_is_stored_past_the_caches_errs_together() -> None:
    """Of ways to store that are estimated nearly alike, each is on a short list before more of the same way."""
    ways = {
        Candidate("grid", (("BM", BM), ("nt", nt))): 1e-3 + BM * 1e-6 + nt * 3e-5 for BM in range(1, 9) for nt in (0, 1)
    }
    chosen = shortlist(ways, 3)
    assert [candidate.params["nt"] for candidate in chosen] == [0, 1, 0]


def test_functions_over_candidates_agree_as_far_as_these_are_near() -> None:
    candidates = [cut(4, 4), cut(5, 4), cut(8, 4), cut(64, 64)]
    space = Space(candidates)
    found = space.functions(np.random.default_rng(1), 20000)
    assert np.corrcoef(found)[0] == pytest.approx(space.nearness(candidates[0]), abs=0.03)
    assert found.mean(1) == pytest.approx(0, abs=0.03)
    assert found.std(1) == pytest.approx(1, abs=0.03)
