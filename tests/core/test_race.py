"""The arithmetic of timing, on a scripted clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise, repeat
from typing import Any

import pytest
from scripted import Machine, timing

from autoconv.tuning.timing.contestant import Timing
from autoconv.tuning.timing.race import (
    FAIR_SHARE,
    FEWEST,
    IDLE,
    LONGEST_SPIN,
    MOST,
    STEADY,
    spread,
    wait_until_idle,
)

# --- what is reported -----------------------------------------------------------------------------------------


def test_spread_is_half_the_interquartile_range_over_the_median() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == pytest.approx(1 / 3)
    assert spread([2.0, 4.0]) == pytest.approx(0.5 / 3)
    assert spread([2.0]) == 0.0


def test_the_median_and_the_spread_are_exact(machine: Machine) -> None:
    entrant = machine.contestant("a", [5.0, 1.0, 3.0], hot=[9.0, 1.0, 2.0], pack=[7.0, 1.0, 4.0])
    found = machine.race(entrant)["a"]
    assert found == Timing(time=3.0, hot=1.0, pack=7.0, spread=pytest.approx(1 / 3), samples=3)


def test_a_quick_contestant_is_packed_and_run_hot_a_few_times(machine: Machine) -> None:
    entrant = machine.contestant("a", 1e-3, hot=[9e-3, 3e-4, 1e-4, 2e-4], pack=[7e-4, 1e-4, 4e-4])
    found = timing(machine.race(entrant)["a"])
    assert found.hot == pytest.approx(1e-4)
    assert found.pack == pytest.approx(1e-4)


def test_who_retired_in_a_quiet_second_is_not_taken_for_quicker_than_those_who_raced_on(machine: Machine) -> None:
    quick = machine.contestant("quick", chain([1e-3] * 3, repeat(3e-3)))
    slow = machine.contestant("slow", 1.5e-3)
    found = machine.race(quick, slow)
    assert machine.samples("slow") == 3
    assert machine.samples("quick") > 6  # most of them in the busy seconds
    assert timing(found["quick"]).time == pytest.approx(3e-3)
    assert timing(found["slow"]).time == pytest.approx(4.5e-3)  # at the pace of those seconds


def test_one_lucky_run_does_not_win(machine: Machine) -> None:
    lucky = machine.contestant("lucky", chain([1.1e-3] * 4, [0.8e-3], repeat(1.1e-3)))
    found = machine.race(lucky, machine.contestant("steady", 1e-3))
    assert timing(found["lucky"]).time == 1.1e-3
    assert timing(found["steady"]).time == 1e-3


def test_the_warm_up_does_not_count(machine: Machine) -> None:
    found = timing(machine.race(machine.contestant("a", 1e-3, hot=chain([1.0], repeat(1e-3))))["a"])
    assert found.hot == 1e-3
    assert found.time == 1e-3
    assert machine.log[0] == ("a", "hot")


def test_nobody_races(machine: Machine) -> None:
    assert machine.race() == {}


# --- when it ends ---------------------------------------------------------------------------------------------


def test_steady_times_end_the_race_soon_and_noisy_ones_go_on(machine: Machine) -> None:
    assert timing(machine.race(machine.contestant("a", 1e-3))["a"]).samples == STEADY
    noisy = machine.contestant("b", chain.from_iterable(repeat([1e-3, 1.2e-3])))
    found = timing(machine.race(noisy)["b"])
    assert found.samples == MOST
    assert found.spread == pytest.approx(0.1)


def test_noise_that_settles_ends_the_race(machine: Machine) -> None:
    settling = machine.contestant("a", chain([1.5e-3, 0.5e-3, 1.5e-3], repeat(1e-3)))
    assert STEADY < timing(machine.race(settling)["a"]).samples < MOST


def test_those_close_to_the_best_go_on_together(machine: Machine) -> None:
    noisy = machine.contestant("a", chain.from_iterable(repeat([1e-3, 1.2e-3])))
    close = [machine.contestant(name, seconds) for name, seconds in (("near", 1.05e-3), ("close", 1.2e-3))]
    found = machine.race(noisy, *close, machine.contestant("far", 1.9e-3))
    assert timing(found["near"]).samples == MOST
    assert timing(found["close"]).samples == STEADY  # the field grows smaller while samples double
    assert timing(found["far"]).samples == FEWEST


def test_close_by_packing_included_is_close(machine: Machine) -> None:
    packs = machine.contestant("packs", 1e-3, pack=1e-3)
    plain = machine.contestant("plain", chain.from_iterable(repeat([1.8e-3, 2.1e-3])))
    assert timing(machine.race(packs, plain)["plain"]).samples == MOST


def test_slow_runs_are_content_with_the_fewest_samples(machine: Machine) -> None:
    slow = machine.contestant("a", chain.from_iterable(repeat([FAIR_SHARE, 2 * FAIR_SHARE])))
    assert timing(machine.race(slow)["a"]).samples == FEWEST


def test_much_slower_but_smaller_gets_the_fewest_samples_and_no_more(machine: Machine) -> None:
    found = machine.race(machine.contestant("fast", 0.05, workspace=9), machine.contestant("small", 0.9))
    assert timing(found["small"]).samples == FEWEST
    assert timing(found["small"]).dropped_by is None
    assert machine.samples("small", "hot") == 1 + 1


@pytest.mark.parametrize(("seconds", "samples"), [(0.11, 0), (0.09, FEWEST)])
def test_slow_and_far_behind_is_run_once_though_it_be_smaller(machine: Machine, seconds: float, samples: int) -> None:
    found = machine.race(machine.contestant("fast", 4e-3, workspace=9), machine.contestant("small", seconds))
    assert timing(found["small"]).samples == machine.samples("small") == samples
    assert timing(found["small"]).time == seconds
    assert timing(found["small"]).dropped_by is None


def test_slow_and_far_behind_one_that_comes_later_is_not_run_again(machine: Machine) -> None:
    found = machine.race(machine.contestant("small", 0.9), machine.contestant("fast", 1e-3, workspace=9))
    assert timing(found["small"]).samples == machine.samples("small") == 1


def test_twenty_candidates_take_two_or_three_seconds(machine: Machine) -> None:
    machine.race(*(machine.contestant(f"c{i}", 0.008 * 1.15**i, pack=0.001) for i in range(20)))
    assert machine.now < 3


def test_newcomers_are_held_against_what_the_best_takes_in_the_same_seconds(machine: Machine) -> None:
    """The second heat comes in seconds in which everything takes half as long again."""
    first = machine.contestant("first", chain([1e-3] * 3, [1.5e-3] * 3, repeat(1e-3)))
    better = machine.contestant("better", chain([1.35e-3] * 3, repeat(0.9e-3)))
    worse = machine.contestant("worse", chain([2.1e-3] * 3, repeat(1.4e-3)))
    found = machine.heats([first], [better, worse])
    assert timing(found["better"]).time == 0.9e-3
    assert timing(found["first"]).time == 1e-3
    assert machine.samples("worse") == FEWEST


def test_who_was_best_in_slow_seconds_is_not_taken_for_quicker_than_it_is(machine: Machine) -> None:
    first = machine.contestant("first", chain([1e-3] * 3, [1.5e-3] * 3, repeat(1e-3)))
    second = machine.contestant(
        "second", chain([0.96e-3] * 3, repeat(0.8e-3))
    )  # when the first took half as long again
    third = machine.contestant("third", 0.9e-3)
    found = machine.heats([first], [second], [third])
    assert machine.samples("third") > FEWEST
    assert timing(found["second"]).time == 0.8e-3


def test_who_was_raced_in_slow_seconds_is_not_held_against_quicker_ones(machine: Machine) -> None:
    """The first heat comes in seconds in which everything takes half as long again."""
    first = machine.contestant("first", chain([1.5e-3] * 3, repeat(1e-3)))
    second = machine.contestant("second", chain([1.53e-3] * 3, repeat(0.9e-3)))
    worse = machine.contestant("worse", chain([2.1e-3] * 3, repeat(1.4e-3)))
    found = machine.heats([first, second, worse], [machine.contestant("third", 0.99e-3)])
    assert timing(found["second"]).time == 0.9e-3
    assert machine.samples("worse") == FEWEST


def test_who_alone_was_disturbed_makes_nobody_too_good_to_be_true(machine: Machine) -> None:
    """In the second heat the best so far takes half as long again, and the newcomer does not."""
    first = machine.contestant("first", chain([1e-3] * 3, [1.5e-3] * 3, repeat(1e-3)))
    second = machine.contestant("second", chain([1.1e-3] * 3, repeat(0.9e-3)))
    found = machine.heats([first, second], [machine.contestant("newcomer", 1.05e-3)])
    assert timing(found["second"]).time == 0.9e-3


def test_what_was_sampled_before_the_final_does_not_count_in_it(machine: Machine) -> None:
    first = machine.contestant("first", chain([1e-3] * 3, repeat(2e-3)))
    found = machine.heats([first], [machine.contestant("second", chain([2.1e-3] * 3, repeat(1.9e-3)))])
    assert timing(found["first"]) == Timing(time=2e-3, hot=1e-3, pack=0.0, spread=0.0, samples=STEADY)
    assert timing(found["second"]).time == 1.9e-3


# --- order, pools, failures, budget ---------------------------------------------------------------------------


def test_rounds_are_interleaved_and_their_order_changes(machine: Machine) -> None:
    names = "abcdef"
    machine.race(*(machine.contestant(name, 1e-3) for name in names))
    order = [name for name, kind in machine.log if kind == "cold"]
    rounds = ["".join(order[i : i + 6]) for i in range(0, len(order), 6)]
    assert len(rounds) == STEADY
    assert rounds[0] == names
    assert all(sorted(r) == list(names) for r in rounds)
    assert len(set(rounds)) == STEADY
    again = Machine()
    again.race(*(again.contestant(name, 1e-3) for name in names))
    assert again.log == machine.log


def test_idle_time_between_pools_and_few_changes(machine: Machine) -> None:
    pools = {"a": "ours", "b": "theirs", "c": "ours", "d": "theirs"}
    machine.race(*(machine.contestant(name, 1e-3, pool=pool) for name, pool in pools.items()))
    turns = [name for name, kind in machine.log if kind in ("cold", "sleep")]
    for before, after in pairwise(turns):
        if before and after:
            assert pools[before] == pools[after]
    # Three between the four probes, then one in each round of two pools.
    assert turns.count("") == 3 + STEADY - 1
    assert machine.now >= IDLE * turns.count("")


@pytest.mark.parametrize(("spinning", "slept"), [(0.0, IDLE), (10.5 * IDLE, 12 * IDLE), (9.0, LONGEST_SPIN)])
def test_idle_time_ends_when_no_thread_spins(machine: Machine, spinning: float, slept: float) -> None:
    machine.spinning = spinning
    wait_until_idle(machine.sleep, machine.busy)
    assert machine.now == pytest.approx(slept)


def test_one_pool_needs_no_idle_time(machine: Machine) -> None:
    machine.race(machine.contestant("a", 1e-3), machine.contestant("b", 1e-3))
    assert ("", "sleep") not in machine.log


@pytest.mark.parametrize("failing", [[RuntimeError("broke")], [1e-3, RuntimeError("broke")]])
def test_whoever_raises_is_out_with_the_reason_and_the_race_goes_on(machine: Machine, failing: list[Any]) -> None:
    found = machine.race(machine.contestant("bad", failing), machine.contestant("good", 1e-3))
    assert found["bad"] == "RuntimeError: broke"
    assert timing(found["good"]).samples == STEADY


def test_all_fail(machine: Machine) -> None:
    bad = machine.contestant("bad", 1.0, hot=[MemoryError("none left")])
    assert machine.race(bad) == {"bad": "unreached, no memory: MemoryError: none left"}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_failures(machine: Machine, seconds: float) -> None:
    found = machine.race(machine.contestant("bad", [1e-3, seconds]), machine.contestant("good", 1e-3))
    assert "the clock gave" in str(found["bad"])
    assert isinstance(found["good"], Timing)


def test_ctrl_c_is_nobodys_failure(machine: Machine) -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.race(replace(machine.contestant("a", 1e-3), cold=interrupted))


def test_whom_the_budget_did_not_reach(machine: Machine) -> None:
    found = machine.race(*(machine.contestant(name, 0.05) for name in "abc"), budget=0.1)
    assert [timing(found[name]).samples for name in "ab"] == [1, 1]  # run again, as both took as long
    assert found["c"] == "unreached: the budget of 0.1 s was spent"


def test_a_small_budget_is_for_one_run_of_everyone_and_a_second_of_the_quickest(machine: Machine) -> None:
    seconds = {"a": 0.09, "b": 0.07, "c": 0.05, "d": 0.06}
    found = machine.race(*(machine.contestant(name, each) for name, each in seconds.items()), budget=0.3)
    assert [name for name, _ in machine.log] == [*"abcd", "c", "d"]
    assert {name: timing(result).time for name, result in found.items()} == seconds
    assert [timing(found[name]).samples for name in seconds] == [0, 0, 1, 1]


def test_a_single_long_run_that_was_disturbed_decides_nothing(machine: Machine) -> None:
    unlucky = machine.contestant("unlucky", 0.04, hot=chain([0.05], repeat(0.04)))
    other = machine.contestant("other", 0.045)
    third = machine.contestant("third", 0.09)
    found = machine.race(unlucky, other, third, budget=0.2)
    assert timing(found["unlucky"]).time == 0.04
    assert timing(found["other"]).time == 0.045


def test_a_budget_that_suffices_changes_nothing(machine: Machine) -> None:
    names = "abc"
    machine.race(*(machine.contestant(name, 0.01) for name in names), budget=1.0)
    again = Machine()
    again.race(*(again.contestant(name, 0.01) for name in names))
    assert again.log == machine.log


def test_the_budget_ends_the_rounds(machine: Machine) -> None:
    noisy = machine.contestant("a", chain.from_iterable(repeat([1e-3, 2e-3])))
    found = timing(machine.race(noisy, budget=0.02)["a"])
    assert FEWEST < found.samples < MOST
    assert machine.now < 0.02 + 0.003


def test_no_budget_at_all_reaches_nobody(machine: Machine) -> None:
    assert machine.race(machine.contestant("a", 1e-3), budget=0.0) == {"a": "unreached: the budget of 0 s was spent"}


def test_progress_is_told_before_every_turn(machine: Machine) -> None:
    events: list[tuple[str, int, int]] = []
    machine.race(
        machine.contestant("a", 1e-3),
        machine.contestant("far", 1.9e-3),
        on_event=lambda candidate, *counts: events.append((str(candidate), *counts)),
    )
    assert events[:2] == [("a", 0, 2), ("far", 1, 2)]
    assert events[-1] == ("a", 1, 2)
    assert len(events) == STEADY + FEWEST


def test_who_lacks_memory_while_it_is_timed_may_try_again(machine: Machine) -> None:
    found = machine.race(machine.contestant("a", 1e-3), machine.contestant("b", [MemoryError("4 GiB")]))
    assert found["b"] == "unreached, no memory: MemoryError: 4 GiB"
