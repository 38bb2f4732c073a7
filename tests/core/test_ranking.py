"""Limits asked of facts, and the order of the candidates that remain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from races import facts

from autoconv.algorithm import Candidate
from autoconv.records.limits import Limits
from autoconv.records.limits import ranking as ranked_candidates
from autoconv.records.schema import Facts


def ranking(found: dict[str, Facts], limits: Limits, arrays: int = 0) -> list[str]:
    """The order of candidates that have only a name."""
    return list(map(str, ranked_candidates({Candidate(name): facts for name, facts in found.items()}, limits, arrays)))


# --- limits ---------------------------------------------------------------------------------------------------


def test_every_reason_is_given_at_once() -> None:
    limits = Limits(workspace_limit=10, deterministic=True, tolerance=1e-6, vendors=frozenset({"torch"}))
    bad = facts(1, workspace=8, packed=3, deterministic=False, error=2e-6, tf32=True, vendor="onnxruntime")
    reasons = limits.why_not(bad)
    assert len(reasons) == 5
    for reason, words in zip(reasons, ("11 bytes", "deterministic", "2.0e-06", "TF32", "onnxruntime"), strict=True):
        assert words in reason


def test_limits_are_told_as_they_are_set() -> None:
    assert str(Limits()) == str(Limits(vendors=frozenset())) == "no limits"
    limits = Limits(workspace_limit=0, tolerance=0.0, weights="constant", vendors=frozenset({"torch", "onnxruntime"}))
    assert str(limits) == "workspace_limit=0, tolerance=0.0, weights='constant', with onnxruntime and torch"


def test_a_failure_is_the_only_reason() -> None:
    assert Limits(workspace_limit=0).why_not(Facts("1", failure="wrong result", workspace=9)) == ["wrong result"]


def test_limits_are_inclusive() -> None:
    edge = facts(1, workspace=10, error=1e-6, tf32=True, vendor="torch", deterministic=False)
    limits = Limits(workspace_limit=10, tolerance=1e-6, allow_tf32=True, vendors=frozenset({"torch"}))
    assert limits.why_not(edge) == []
    assert Limits(allow_tf32=True).why_not(edge) == []


def test_packing_counts_only_where_weights_vary() -> None:
    packer = facts(2, pack=3, workspace=5, packed=7)
    assert (Limits().cost(packer), Limits().workspace(packer)) == (5, 12)
    constant = Limits(weights="constant")
    assert (constant.cost(packer), constant.workspace(packer)) == (2, 5)
    assert Limits(workspace_limit=11).why_not(packer)
    assert not replace(constant, workspace_limit=5).why_not(packer)


# --- ranking --------------------------------------------------------------------------------------------------


def test_the_fastest_first_and_what_is_not_allowed_nowhere() -> None:
    found = {"slow": facts(3), "fast": facts(1), "mid": facts(2), "out": facts(0.1, error=1), "bad": Facts("1", "x")}
    assert ranking(found, Limits(tolerance=0.5)) == ["fast", "mid", "slow"]


def test_constant_weights_choose_another_winner() -> None:
    found = {"packs": facts(1, pack=5), "plain": facts(2)}
    assert ranking(found, Limits())[0] == "plain"
    assert ranking(found, Limits(weights="constant"))[0] == "packs"


def test_within_the_noise_less_workspace_wins_then_the_faster_then_the_name() -> None:
    assert ranking({"a": facts(1.0, workspace=9), "b": facts(1.009)}, Limits()) == ["b", "a"]
    assert ranking({"a": facts(1.0, workspace=9), "b": facts(1.011)}, Limits()) == ["a", "b"]
    assert ranking({"b": facts(1.0), "a": facts(1.009)}, Limits()) == ["b", "a"]
    assert ranking({"b": facts(1.0), "a": facts(1.0)}, Limits()) == ["a", "b"]


def test_of_equally_fast_ones_that_need_the_same_the_faster_with_hot_filters_comes_first() -> None:
    found = {"a": facts(1.0, hot=0.9), "b": facts(1.005, hot=0.8), "c": facts(1.004), "d": facts(1.02, hot=0.1)}
    assert ranking(found, Limits(weights="constant")) == ["b", "a", "c", "d"]
    packed = {"a": facts(1.0, hot=0.9), "b": facts(0.605, pack=0.4, hot=0.7)}  # which counts in either state
    assert ranking(packed, Limits()) == ["a", "b"]


def test_who_is_slower_with_hot_filters_by_more_than_the_noise_is_no_equal() -> None:
    found = {"small": facts(1.0, hot=0.9), "large": facts(1.005, hot=0.8, workspace=9)}
    assert ranking(found, Limits(), 0) == ["large", "small"]
    near = found | {"large": facts(1.005, hot=0.88, workspace=9)}
    assert ranking(near, Limits(), 0) == ["small", "large"]
    alone = {Candidate("direct"): facts(1.0, hot=0.9), Candidate.parse("w[coop=1]"): facts(1.005, hot=0.8)}
    assert list(map(str, ranked_candidates(alone, Limits(), 0))) == ["w[coop=1]", "direct"]


def test_less_workspace_wins_where_it_matters_beside_the_layer_s_own_arrays() -> None:
    found = {"a": facts(1.0, workspace=1200), "b": facts(1.005, workspace=1000), "c": facts(1.009, workspace=100)}
    assert ranking(found, Limits(), 200 * 64 - 1) == ["c", "b", "a"]
    assert ranking(found, Limits(), 200 * 64) == ["c", "a", "b"]
    assert ranking(found, Limits(), 1100 * 64) == ["a", "b", "c"]
    packed = {"a": facts(1.0, packed=1200), "b": facts(1.005, packed=1000)}
    assert ranking(packed, Limits(), 100 * 64) == ["b", "a"]
    assert ranking(packed, Limits(weights="constant"), 100 * 64) == ["a", "b"]  # they are the caller's


def test_of_equally_fast_ones_those_come_first_whose_threads_work_on_their_own() -> None:
    names = ("w[coop=1]", "w[coop=0]", "w[coop=2]", "x", "w[coop=0,n=1]")
    times, workspaces = (1.0, 1.009, 1.001, 1.008, 1.02), (0, 9, 5, 3, 0)
    found = {
        Candidate.parse(name): facts(time, workspace=workspace)
        for name, time, workspace in zip(names, times, workspaces, strict=True)
    }
    ranked = list(map(str, ranked_candidates(found, Limits(), 0)))
    assert ranked == ["x", "w[coop=0]", "w[coop=1]", "w[coop=2]", "w[coop=0,n=1]"]


@pytest.mark.parametrize("noisy", ["a", "b"])
def test_the_larger_spread_of_both_is_the_noise(noisy: str) -> None:
    found = {"a": facts(1.0, workspace=9), "b": facts(1.02)}
    assert ranking(found, Limits()) == ["a", "b"]
    found[noisy] = replace(found[noisy], spread=0.02)
    assert ranking(found, Limits()) == ["b", "a"]
    found[noisy] = replace(found[noisy], samples=25)  # more samples of the same spread are surer
    assert ranking(found, Limits()) == ["a", "b"]


def test_a_wild_spread_does_not_tie_with_what_is_far_ahead() -> None:
    found = {"a": facts(1.0, workspace=9), "b": facts(1.2, spread=0.9)}
    assert ranking(found, Limits()) == ["a", "b"]


def test_one_or_two_samples_are_noisy_whatever_their_spread() -> None:
    found = {"a": facts(1.0, workspace=9), "b": facts(1.025, samples=2)}
    assert ranking(found, Limits()) == ["b", "a"]


def test_noise_is_not_chained() -> None:
    """Each is within the noise of the one before, and yet the last does not win from far behind."""
    chain = {f"c{i}": facts(1.009**i, workspace=9 - i) for i in range(5)}
    assert ranking(chain, Limits()) == ["c1", "c0", "c3", "c2", "c4"]


some_facts = st.builds(
    Facts,
    version=st.just("1"),
    time=st.floats(1e-6, 1),
    pack=st.floats(0, 1),
    spread=st.floats(0, 1),
    samples=st.integers(1, 9),
    workspace=st.integers(0, 3),
    packed=st.integers(0, 3),
)


@given(st.dictionaries(st.sampled_from("abcdefgh"), some_facts), st.randoms(use_true_random=False))
def test_the_ranking_does_not_depend_on_the_order_and_stays_near_the_fastest(found: dict[str, Facts], rng: Any) -> None:
    names = list(found)
    rng.shuffle(names)
    ranked = ranking(found, Limits())
    assert ranked == ranking({name: found[name] for name in names}, Limits())
    assert sorted(ranked) == sorted(found)
    if ranked:
        fastest = min(map(Limits().cost, found.values()))
        winner = found[ranked[0]]
        assert Limits().cost(winner) <= 1.1 * fastest
        assert all(
            Limits().workspace(winner) <= Limits().workspace(f)
            for f in found.values()
            if Limits().cost(f) <= 1.01 * fastest
        )
