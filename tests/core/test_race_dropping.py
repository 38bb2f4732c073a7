"""Who is dropped early from a race, and who is not: on a scripted clock."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import pytest
from scripted import Machine, timing

from autoconv.algorithm import Candidate
from autoconv.tuning.timing.contestant import Timing
from autoconv.tuning.timing.race import FEWEST, STEADY

FASTEST = Candidate("fast")
FAST = {"workspace": 4, "packed": 2, "error": 1e-7, "exact": True}
SLOW = {"workspace": 4, "packed": 2, "error": 1e-7, "exact": True}


def against(machine: Machine, slow: float = 3e-3, pack: float | None = None, **changes: Any) -> Timing:
    """The timing of a slow contestant that may be better in something, against a fast one."""
    fast = machine.contestant("fast", 1e-3, **FAST)
    return timing(machine.race(fast, machine.contestant("slow", slow, pack=pack, **SLOW | changes))["slow"])


def test_no_better_in_anything_and_half_as_fast_is_dropped(machine: Machine) -> None:
    found = against(machine)
    assert (found.dropped_by, found.samples) == (FASTEST, 2)


def test_four_times_slower_is_dropped_at_once(machine: Machine) -> None:
    found = against(machine, slow=4e-3)
    assert (found.dropped_by, found.samples, found.time) == (FASTEST, 1, 4e-3)
    assert found.hot is None


def test_a_long_warm_up_that_is_clearly_slower_is_not_even_probed(machine: Machine) -> None:
    found = against(machine, slow=0.5)
    assert (found.dropped_by, found.samples, found.time) == (FASTEST, 0, 0.5)
    assert machine.samples("slow") == 0


def test_less_than_twice_as_slow_is_not_dropped(machine: Machine) -> None:
    found = against(machine, slow=1.99e-3)
    assert (found.dropped_by, found.samples) == (None, FEWEST)


@pytest.mark.parametrize(
    ("changes", "rival"),
    [
        ({"workspace": 3}, {}),
        ({"packed": 1}, {}),
        ({"error": 0.5e-7}, {}),
        ({}, {"deterministic": False}),
        ({}, {"tf32": True}),
        ({}, {"exact": False}),
        ({}, {"keeps_denormals": False}),
        ({}, {"vendor": "torch"}),
        ({"vendor": "onnxruntime"}, {"vendor": "torch"}),
    ],
)
def test_better_in_anything_is_not_dropped(machine: Machine, changes: dict[str, Any], rival: dict[str, Any]) -> None:
    fast = machine.contestant("fast", 1e-3, **FAST | rival)
    slow = machine.contestant("slow", 9e-3, **SLOW | changes)
    found = timing(machine.race(fast, slow)["slow"])
    assert (found.dropped_by, found.samples) == (None, FEWEST)


@pytest.mark.parametrize(
    "changes",
    [
        {"workspace": 5},
        {"packed": 3},
        {"error": 2e-7},
        {"deterministic": False},
        {"tf32": True},
        {"exact": False},
        {"keeps_denormals": False},
        {"vendor": "torch"},
    ],
)
def test_worse_in_anything_is_dropped(machine: Machine, changes: dict[str, Any]) -> None:
    assert against(machine, **changes).dropped_by == FASTEST


def test_less_workspace_but_more_with_the_packed_filters_is_no_rival(machine: Machine) -> None:
    fast = machine.contestant("fast", 1e-3, workspace=0, packed=9)
    slow = machine.contestant("slow", 9e-3, workspace=4)
    assert timing(machine.race(fast, slow)["slow"]).dropped_by is None


def test_a_rival_must_be_twice_as_fast_with_packing_too(machine: Machine) -> None:
    fast = machine.contestant("fast", 1e-3, pack=1e-3)
    assert timing(machine.race(fast, machine.contestant("slow", 3e-3))["slow"]).dropped_by is None
    fast = machine.contestant("fast", 1e-3, pack=0.5e-3)
    assert timing(machine.race(fast, machine.contestant("slow", 3e-3))["slow"]).dropped_by == FASTEST


def test_a_rival_that_fails_later_releases_whom_it_dropped(machine: Machine) -> None:
    fast = machine.contestant("fast", [1e-3, ValueError("no")])
    found = machine.race(fast, machine.contestant("slow", 3e-3))
    assert found["fast"] == "ValueError: no"
    assert timing(found["slow"]).dropped_by is None
    assert timing(found["slow"]).samples >= STEADY


def test_a_first_sample_that_was_unlucky_is_taken_back(machine: Machine) -> None:
    unlucky = machine.contestant("unlucky", chain([3e-3], repeat(0.5e-3)))
    found = timing(machine.race(machine.contestant("fast", 1e-3), unlucky)["unlucky"])
    assert found.time == 0.5e-3
    assert found.dropped_by is None


def test_one_disturbed_sample_ends_nobodys_race(machine: Machine) -> None:
    """A warm-up that took a part of it says that something else may have been at work; a second one is believed."""
    disturbed = machine.contestant("disturbed", chain([20e-3], repeat(0.5e-3)))
    slow = machine.contestant("slow", repeat(20e-3))
    found = machine.race(machine.contestant("fast", 1e-3), disturbed, slow)
    assert timing(found["disturbed"]).time == 0.5e-3
    assert timing(found["disturbed"]).dropped_by is None
    assert (timing(found["slow"]).time, timing(found["slow"]).samples) == (20e-3, 2)
