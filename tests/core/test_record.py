"""The record: a common clock for races, which of them stay, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from races import facts

from autoconv.algorithm import Candidate
from autoconv.errors import RecordError
from autoconv.records.clocks import Counts
from autoconv.records.schema import MAX_RACES, Facts, Race, Record

LAYER = "fwd-float32-NCHW-N1-C3-H8-W8-K4-R3-S3"
DEVICE = "cpu-test"


def race(number: int, when: int | None = None, **entrants: float | Facts) -> Race:
    found = {Candidate.parse(name): f if isinstance(f, Facts) else facts(f) for name, f in entrants.items()}
    day = number if when is None else when
    return Race(f"{number:032x}", f"2026-01-{day:02}T00:00:00+00:00", {"numpy": "2"}, False, None, found)


def record(*races: Race) -> Record:
    return Record(LAYER, DEVICE, races)


def known(found: Record) -> dict[str, Facts]:
    """What a record knows, by the names of the candidates."""
    return {str(candidate): facts for candidate, facts in found.facts().items()}


# --- a common clock -------------------------------------------------------------------------------------------


def test_older_times_are_scaled_through_what_ran_in_both() -> None:
    old = race(1, a=2.0, b=facts(6.0, hot=4.0, pack=2.0))
    found = known(record(old, race(2, a=1.0)))
    assert found["a"].time == 1.0
    assert found["b"] == replace(old.facts[Candidate("b")], time=3.0, hot=2.0, pack=1.0)


def test_the_scale_is_the_median_of_the_ratios() -> None:
    found = known(record(race(1, a=1.0, b=1.0, c=1.0, d=1.0), race(2, a=2.0, b=3.0, c=50.0)))
    assert found["d"].time == 3.0


def test_races_are_joined_through_older_ones() -> None:
    found = known(record(race(1, a=1.0, b=2.0), race(2, b=20.0, c=30.0), race(3, a=4.0)))
    assert (found["a"].time, found["b"].time, found["c"].time) == (4.0, 8.0, 12.0)


def test_several_races_are_joined_to_the_newest_by_different_candidates() -> None:
    found = known(record(race(1, b=20.0, d=30.0), race(2, a=10.0, c=40.0), race(3, a=1.0, b=1.0)))
    assert (found["c"].time, found["d"].time) == (4.0, 1.5)


def test_the_newest_facts_count_even_when_an_older_race_joins_them() -> None:
    found = known(record(race(1, a=1.0, b=2.0, c=9.0), race(2, b=20.0, c=30.0), race(3, a=4.0)))
    factor = (8.0 / 20.0 + 36.0 / 30.0) / 2
    assert found["c"].time == pytest.approx(30.0 * factor)


def test_a_race_without_a_common_candidate_is_not_compared() -> None:
    found = known(record(race(1, a=1.0, b=Facts("1", "died of signal 11")), race(2, c=5.0)))
    assert set(found) == {"b", "c"}


def test_another_version_is_another_candidate_but_where_nothing_else_tells_how_races_compare() -> None:
    older = race(1, a=1.0, b=2.0, c=3.0)
    found = known(record(older, race(2, a=facts(4.0, version="2"))))
    assert (found["a"].version, found["a"].time, found["b"].time) == ("2", 4.0, 8.0)
    found = known(record(older, race(2, a=facts(4.0, version="2"), c=6.0)))
    assert (found["a"].time, found["b"].time) == (4.0, 4.0)


def test_an_also_ran_that_alone_is_as_it_was_hides_nobody() -> None:
    """As after another release, whose records know today's best: the user's race is newer, and of one that is slow."""
    shipped = race(1, best=facts(1.0, version="2"), near=facts(1.5, version="2"))
    own = race(2, best=2.0, near=3.0, slow=facts(40.0, version="2"))
    found = record(shipped, own).facts(of_version("2"))
    assert {str(c): f.time for c, f in found.items()} == {"slow": 40.0, "best": 2.0, "near": 3.0}


def test_a_failed_newest_race_does_not_hide_the_times_before_it() -> None:
    found = known(record(race(1, a=1.0, b=2.0), race(2, a=Facts("1", "wrong result"))))
    assert found["a"].failure == "wrong result"
    assert found["b"].time == 2.0


def test_what_was_not_reached_keeps_its_older_facts() -> None:
    late = Facts("1", "unreached: the budget of 2 s was spent")
    found = known(record(race(1, a=1.0, b=2.0), race(2, a=2.0, b=late)))
    assert found["b"].time == 4.0
    found = known(record(race(1, a=1.0, b=2.0), race(2, a=2.0, b=replace(late, version="2"))))
    assert found["b"].unreached


def of_version(number: str) -> Counts:
    return lambda candidate, facts: facts.version == number


def test_facts_that_count_come_before_newer_ones() -> None:
    """As those that a release ships, before a user's of older code."""
    later = {"a": facts(5.0, version="2"), "b": Facts("2", "wrong result")}
    both = record(race(1, **later), race(2, a=1.0, b=2.0, c=3.0))
    found = {str(c): f for c, f in both.facts(of_version("2")).items()}
    assert found == later | {"c": facts(15.0)}
    assert both.facts(of_version("1")) == both.facts(of_version("3")) == both.facts()


def test_the_clock_is_that_of_the_newest_race_with_times_that_count() -> None:
    shipped = race(1, a=facts(4.0, version="2"), same=facts(8.0, version="2"))
    older = race(2, a=1.0, same=facts(2.0, version="2"))
    for races, time in (((shipped, older), 1.0), ((shipped, race(3, a=1.0)), 4.0)):
        assert record(*races).facts(of_version("2"))[Candidate("a")].time == time


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(1e-3, 1e3), min_size=1), min_size=1, max_size=6))
def test_a_clock_twice_as_fast_changes_nothing(times: list[dict[str, float]]) -> None:
    """Whatever the speed of the machine was in older races, the facts on the newest clock are the same."""
    races = [race(i + 1, **entrants) for i, entrants in enumerate(times)]
    other = [race(i + 1, **{n: t * 2.0**i for n, t in e.items()}) for i, e in enumerate(reversed(times))]
    expected, found = known(record(*races)), known(record(*reversed(other)))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].time == pytest.approx(value.time, rel=1e-12)


# --- adding and merging ---------------------------------------------------------------------------------------


def test_a_race_that_knows_nothing_best_is_dropped() -> None:
    again = record(race(1, a=1.0, b=2.0)).with_race(race(2, a=1.0, b=2.0))
    assert [r.id for r in again.races] == [f"{2:032x}"]


def test_a_race_that_was_cut_short_drops_nothing() -> None:
    late = Facts("1", "unreached: budget")
    assert len(record(race(1, a=1.0, b=2.0)).with_race(race(2, a=1.0, b=late)).races) == 2


def test_a_race_that_joins_others_is_kept() -> None:
    joined = record(race(1, b=9.0, c=1.0), race(2, a=1.0, b=2.0)).with_race(race(3, b=1.0)).with_race(race(4, a=1.0))
    assert known(joined).keys() == {"a", "b", "c"}


def test_a_race_that_is_known_keeps_its_place() -> None:
    both = record(race(1, a=1.0, b=2.0), race(2, c=1.0, d=3.0))
    noted = both.with_race(replace(both.races[0], covers="0123abcd"))
    assert [int(r.id, 16) for r in noted.races] == [1, 2]
    assert [r.covers for r in noted.races] == ["0123abcd", ""]


def test_an_older_race_says_less_than_those_that_are_known() -> None:
    newer = record(race(2, a=2.0, b=1.0))
    assert newer.with_race(race(1, a=1.0, b=2.0), newest=False) == newer
    joined = newer.with_race(race(1, a=1.0, c=2.0), newest=False)
    assert [int(r.id, 16) for r in joined.races] == [1, 2]


def test_of_races_of_other_versions_alone_the_newest_stays() -> None:
    """Two versions of the code may take turns; what an earlier one knew best is worth no more than that."""
    found = record()
    for number, version, left in (
        (1, "1", [1]),
        (2, "2", [1, 2]),
        (3, "1", [2, 3]),
        (4, "3", [3, 4]),
        (5, "3", [3, 5]),
    ):
        found = found.with_race(race(number, **{name: facts(1.0, version=version) for name in "ab"}))
        assert [int(r.id, 16) for r in found.races] == left


def test_with_the_newest_race_of_a_version_what_else_that_version_has_found_stays() -> None:
    """Its notes of what is covered stand for all of that; of a version before it nothing stays."""
    first, whole, part = race(1, **of("0")), race(2, **of("1")), race(3, a=facts(1.0, version="1"))
    found = record(first, whole, part).with_race(race(4, **of("2")))
    assert [int(r.id, 16) for r in found.races] == [2, 3, 4]
    assert {str(c) for c, f in found.facts(of_version("1")).items() if f.version == "1"} == {"a", "b"}
    again = found.with_race(race(5, **of("1")))
    assert [int(r.id, 16) for r in again.races] == [4, 5]


def of(version: str) -> dict[str, float | Facts]:
    return {name: facts(1.0, version=version) for name in "ab"}


def test_races_are_bounded_and_the_oldest_go() -> None:
    many = record()
    for number in range(MAX_RACES + 3):
        many = many.with_race(race(number, **{"a": 1.0, f"b{number}": 2.0}))
    assert [int(r.id, 16) for r in many.races] == list(range(3, MAX_RACES + 3))


def test_merging_keeps_races_whole_once_in_the_order_they_were_run() -> None:
    one = record(race(1, a=1.0, b=2.0), race(3, a=1.0, c=2.0))
    two = record(race(2, a=1.0, d=2.0), race(3, a=1.0, c=2.0))
    merged = one.merge(two)
    assert [int(r.id, 16) for r in merged.races] == [1, 2, 3]
    assert merged == two.merge(one)
    assert merged.merge(one) == merged


def test_the_user_is_newer_than_what_was_shipped_later() -> None:
    user, system = record(race(1, when=1, a=1.0)), record(race(2, when=20, a=5.0, b=10.0))
    found = known(user.over(system))
    assert (found["a"].time, found["b"].time) == (1.0, 2.0)


def test_what_is_shipped_stays_whole_below_the_user_s() -> None:
    first, second, own = race(1, a=1.0), race(2, a=2.0), race(3, a=3.0)
    noted = replace(first, covers="0123abcd")
    both = record(noted, own).over(record(first, second))
    assert both.races == (noted, second, own)  # a copy is as old as what it is a copy of
    assert known(both)["a"].time == 3.0


# --- JSON -----------------------------------------------------------------------------------------------------


def plain() -> dict[str, Any]:
    best = facts(1.5, hot=1.0, pack=0.5, spread=0.01, workspace=1, packed=2, error=1e-7, vendor="torch", tf32=True)
    full = record(race(1, **{"gemm[BM=128]": best, "direct": Facts("1", "died of signal 11")}))
    return json.loads(json.dumps(full.to_json(), allow_nan=False))


def test_a_record_comes_back_as_it_was() -> None:
    data = plain()
    assert Record.from_json(data).to_json() == data
    assert data["races"][0]["facts"]["direct"] == {"version": "1", "failure": "died of signal 11"}


BAD = {
    "no layer": ([], "layer", None),
    "layer": ([], "layer", "fwd-float32-NCHW-N0-C3-H8-W8-K4-R3-S3"),
    "layer spelled otherwise": ([], "layer", LAYER + "-groups1"),
    "device": ([], "device", ""),
    "escape codes": ([], "device", "\x1b[2J"),
    "long": ([], "device", "x" * 501),
    "field": ([], "verdict", "gemm"),
    "races": ([], "races", {}),
    "no races": ([], "races", []),
    "id": (["races", 0], "id", "../../etc"),
    "when": (["races", 0], "when", "yesterday"),
    "digits of another script": (["races", 0], "when", "٢٠٢٦-01-01T00:00:00+00:00"),
    "versions": (["races", 0], "versions", {"numpy": 2}),
    "isolated": (["races", 0], "isolated", 1),
    "budget": (["races", 0], "budget", -1),
    "candidates": (["races", 0], "facts", []),
    "candidate": (["races", 0, "facts"], "rm -rf", {"version": "1", "time": 1}),
    "candidate spelled otherwise": (["races", 0, "facts"], "gemm[BM=007]", {"version": "1", "time": 1}),
    "facts": (["races", 0, "facts"], "direct", None),
    "no version": (["races", 0, "facts", "direct"], "version", None),
    "neither": (["races", 0, "facts", "direct"], "failure", None),
    "lines": (["races", 0, "facts", "direct"], "failure", "a\nb"),
    "NaN": (["races", 0, "facts", "gemm[BM=128]"], "time", math.nan),
    "infinite": (["races", 0, "facts", "gemm[BM=128]"], "time", math.inf),
    "zero": (["races", 0, "facts", "gemm[BM=128]"], "time", 0),
    "huge integer": (["races", 0, "facts", "gemm[BM=128]"], "time", 10**400),
    "negative": (["races", 0, "facts", "gemm[BM=128]"], "hot", -1.0),
    "text": (["races", 0, "facts", "gemm[BM=128]"], "pack", "0"),
    "truth": (["races", 0, "facts", "gemm[BM=128]"], "samples", True),
    "fraction": (["races", 0, "facts", "gemm[BM=128]"], "workspace", 1.5),
    "size": (["races", 0, "facts", "gemm[BM=128]"], "packed", 2**63),
    "vendor": (["races", 0, "facts", "gemm[BM=128]"], "vendor", 1),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    path, field, value = BAD[name]
    data: Any = plain()
    inner = data
    for step in path:
        inner = inner[step]
    inner.pop(field, None) if value is None and field != "direct" else inner.update({field: value})
    with pytest.raises(RecordError) as caught:
        Record.from_json(data)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_a_race_twice_is_refused() -> None:
    data = plain()
    data["races"] *= 2
    with pytest.raises(RecordError, match="same id"):
        Record.from_json(data)


@pytest.mark.parametrize("data", [None, [], "x", 1, {}, {"layer": LAYER}])
def test_what_is_no_record_is_refused(data: object) -> None:
    with pytest.raises(RecordError):
        Record.from_json(data)


def test_any_exception_text_becomes_one_bounded_line() -> None:
    failure = Facts("1", failure="Error:\n\tline \x1b[31m two\x00 " + "x" * 9999).failure
    assert failure is not None
    assert failure.startswith("Error: line [31m two ")
    assert failure.isprintable()
    assert len(failure) <= 500
    assert Facts("1", failure="").failure == "unknown"
