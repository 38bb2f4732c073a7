"""The search of a grid: it times a part, and finds what timing all would."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autoconv import forget_plans, registry
from autoconv.algorithm import Algorithm, Candidate, Kernel, Params
from autoconv.cpu.common.grid import parts, register_tiles, steps
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts
from autoconv.tuning import lookup, racing
from autoconv.tuning.candidates import CandidateSet
from autoconv.tuning.planner import plan
from autoconv.tuning.search import nearby
from autoconv.tuning.search.search import MOST, Search
from autoconv.tuning.search.surrogate import Surrogate

LAYER = ConvLayer(N=1, C=3, H=6, W=6, K=4, R=3, S=3)
SIZES = steps(64)


def cut(BM: int, BN: int, name: str = "grid", **more: int | str) -> Candidate:
    return Candidate(name, (("BM", BM), ("BN", BN), *more.items()))


def seconds(candidate: Candidate) -> float:
    """A bowl whose bottom lies where no estimate says, with a wall on one side."""
    BM, BN = (math.log2(int(candidate.params[name])) for name in ("BM", "BN"))
    return 1e-3 * (1 + (BM - 4) ** 2 / 20 + (BN - 2) ** 2 / 20 + (0.5 if BM > 5 else 0))


def searched(expected: dict[Candidate, Facts], measured: dict[Candidate, Facts], **options: Any) -> list[Candidate]:
    """The candidates in the order in which a search times them."""
    search, timed = Search(expected, options.get("exact", ()), options.get("known", {})), []
    while block := search.next():
        assert not set(block) & set(timed)
        timed += block
        search.learn({candidate: measured[candidate] for candidate in block})
    return timed


# --- the surrogate ---------------------------------------------------------------------------------------------


def test_an_estimate_that_errs_by_the_same_factor_everywhere_is_put_right_by_one_measurement() -> None:
    estimates = {cut(BM, BN): seconds(cut(BM, BN)) / 3 for BM, BN in itertools.product(SIZES, SIZES)}
    clock = Surrogate(estimates)
    clock.learn(cut(4, 4), estimates[cut(4, 4)], seconds(cut(4, 4)))
    assert clock.predictions() == {candidate: pytest.approx(seconds(candidate)) for candidate in estimates}


def test_a_measurement_counts_for_those_near_it_and_on_average_for_other_families() -> None:
    clock = Surrogate({cut(BM, 4): 1.0 for BM in SIZES} | {cut(4, 4, "other"): 1.0})
    clock.learn(cut(1, 4), 1.0, 1.0)
    clock.learn(cut(64, 4), 1.0, 2.0)
    found = clock.predictions()
    assert found[cut(1, 4)] < 1.2 < 1.8 < found[cut(64, 4)]
    assert [found[cut(BM, 4)] for BM in SIZES] == sorted(found[cut(BM, 4)] for BM in SIZES)
    assert found[cut(4, 4, "other")] == pytest.approx(math.sqrt(2.0))


def test_words_and_none_at_all_lie_apart_from_numbers() -> None:
    members = [cut(4, 4, coop=coop, way=way) for coop in (0, 1, 2) for way in ("packed", "strided")]
    near = Surrogate(dict.fromkeys(members, 1.0)).nearness(members[2])  # coop=1, packed
    assert near[cut(4, 4, coop=2, way="packed")] > 0.3 > 0.1 > near[cut(4, 4, coop=0, way="packed")]
    assert near[cut(4, 4, coop=1, way="strided")] < 0.1


# --- what is timed ---------------------------------------------------------------------------------------------


def test_a_search_ends_near_the_best_of_a_grid_by_timing_a_part_of_it() -> None:
    grid = [cut(BM, BN) for BM, BN in itertools.product(SIZES, SIZES)]
    flat = {candidate: Facts("1", time=1e-3) for candidate in grid}  # an estimate that knows nothing
    measured = {candidate: Facts("1", time=seconds(candidate), samples=3) for candidate in grid}
    timed = searched(flat, measured)
    best, found = (min(measured[c].time for c in some) for some in (grid, timed))
    assert len(timed) < len(grid) / 2
    assert found <= 1.03 * best


def test_every_kind_that_a_limit_may_ask_for_is_timed_first() -> None:
    kinds = {cut(4, 4, way=way): Facts("1", time=3e-3, error=error, packed=packed) for way, error, packed in KINDS}
    assert kinds.keys() <= set(Search(quick(error=1e-4, packed=128) | kinds, (), {}).next())


KINDS = (("packed", 1e-6, 64), ("careful", 1e-7, 0), ("careless", 1e-5, 0))


def test_a_kind_that_no_limit_prefers_waits_until_it_is_promising() -> None:
    """Whatever is asked for, another is allowed and expected to be quicker; unless estimates cannot tell."""
    slow, near = (cut(4, 4, way=way) for way in ("slow", "near"))
    kinds = {slow: Facts("1", time=3e-3, error=1e-5), near: Facts("1", time=1.1e-3, error=1e-6)}
    first = set(Search(quick(error=1e-7) | kinds, (), {}).next())
    assert near in first
    assert slow not in first


@pytest.mark.parametrize("better", [{"workspace": 1}, {"packed": 1}, {"pack": 5e-3}])
def test_what_undercuts_a_kind_is_as_good_in_all_that_counts(better: dict[str, float]) -> None:
    slow = cut(4, 4, way="slow")
    others = quick(error=1e-7, **better)
    assert slow in Search(others | {slow: Facts("1", time=3e-3, error=1e-5)}, (), {}).next()


def quick(**fields: Any) -> dict[Candidate, Facts]:
    return {cut(BM, BN, way="quick"): Facts("1", time=1e-3, **fields) for BM, BN in itertools.product(SIZES, SIZES)}


def test_who_wants_exact_algorithms_gets_a_search_of_them() -> None:
    """Though others are far ahead."""
    quick, exact = ([cut(BM, BN, name) for BM, BN in itertools.product(SIZES, SIZES)] for name in ("quick", "exact"))
    expected = {c: Facts("1", time=1e-3 if c.algorithm == "quick" else 1e-2) for c in (*quick, *exact)}
    measured = {c: Facts("1", time=seconds(c) * (1 if c.algorithm == "quick" else 10), samples=3) for c in expected}
    timed = [c for c in searched(expected, measured, exact={"exact"}) if c.algorithm == "exact"]
    assert min(measured[c].time for c in timed) <= 1.03 * min(measured[c].time for c in exact)


def test_what_cannot_win_is_not_timed() -> None:
    hopeless = {cut(BM, BN): Facts("1", time=1.0) for BM, BN in itertools.product(SIZES, SIZES)}
    measured = {candidate: Facts("1", time=1.0, samples=3) for candidate in hopeless}
    incumbent = {Candidate("quick"): Facts("1", time=1e-3, samples=9)}
    assert len(searched(hopeless, measured, known=incumbent)) < MOST


def test_a_kind_of_which_every_estimate_errs_is_found_from_the_winner() -> None:
    """A schedule, say, that is estimated a tenth behind another, and is as far ahead."""
    grid = [cut(BM, BN, coop=coop) for BM, BN, coop in itertools.product(SIZES, SIZES, (0, *SIZES))]
    expected = {c: Facts("1", time=1.1e-3 if c.params["coop"] == 0 else 1e-3) for c in grid}
    measured = {c: Facts("1", time=seconds(c) * (0.9 if c.params["coop"] == 0 else 1.0), samples=3) for c in grid}
    timed = searched(expected, measured)
    assert min(timed, key=lambda c: measured[c].time).params["coop"] == 0
    assert len(timed) < len(grid) / 8


def test_steps_of_a_grid_leave_no_gap() -> None:
    for most in (1, 2, 5, 64, 1000):
        found = steps(most)
        assert (found[0], found[-1]) == (1, most)
        assert all(after <= max(before + 1, 1.5 * before) for before, after in itertools.pairwise(found))
        assert parts(most, 16)[-1] <= max(16, 1)
    for instruction_set in ("avx512", "avx2", "generic"):
        assert len(register_tiles(instruction_set)) >= 6


# --- on record -------------------------------------------------------------------------------------------------


class Grid(Algorithm[CPU]):
    """Many cuts that are all the same."""

    name = "grid"
    searched = True

    def __init__(self, version: str = "1") -> None:
        self._version = version

    @property
    def version(self) -> str:
        return self._version

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        return [{"BM": BM, "BN": BN} for BM, BN in itertools.product(SIZES, SIZES)]

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        return []

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        return 1e-3  # it knows nothing

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        return NumpyDirect().build(layer, device, {})


class Scripted:
    """In place of `Measurement`: candidates take what `seconds` says, as long as the budget is not nothing."""

    def __init__(self, layer: ConvLayer, device: Device, *, budget: float | None, **options: Any) -> None:
        self.layer, self.device, self.budget, self.found = layer, device, budget, dict[Candidate, Facts]()
        self.options.append(options)

    blocks: ClassVar[list[list[Candidate]]] = []
    options: ClassVar[list[dict[str, Any]]] = []

    def enter(self, candidates: list[Candidate]) -> dict[Candidate, Facts]:
        self.blocks.append(candidates)
        entered = {candidate: self.facts(candidate) for candidate in candidates}
        self.found |= entered
        return entered

    def facts(self, candidate: Candidate) -> Facts:
        algorithm = registry.by_name(self.device)[candidate.algorithm]
        if self.budget == 0:
            return Facts(algorithm.version, failure="unreached: the budget was spent")
        workspace = algorithm.workspace_bytes(self.layer, self.device, candidate.params)
        took = seconds(candidate) if candidate.items else 1.0
        return Facts(algorithm.version, time=took, samples=9, workspace=workspace)

    def finish(self) -> dict[Candidate, Facts]:
        return self.found


@dataclass(frozen=True)
class GridCPU(CPU):
    """A CPU with NumPy's direct algorithm and a grid."""

    version: str = field(default="1")


@registry.algorithms.register
@functools.cache  # a device has the same algorithms each time
def _(device: GridCPU) -> tuple[Algorithm[Any], ...]:
    return NumpyDirect(), Grid(device.version)


def fresh(
    cache: TuningCache, mode: str = "profile", version: str = "1", layer: ConvLayer = LAYER, **options: Any
) -> Plan:
    """A plan as another process would make it."""
    forget_plans()
    one = CPU.current()
    return plan(layer, mode, device=GridCPU(one.threads, one.instruction_set, version), cache=cache, **options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningCache:
    monkeypatch.setattr(racing, "Measurement", Scripted)
    return TuningCache(tmp_path, system=None)


def test_a_part_of_a_grid_is_timed_once_and_then_nothing(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "HURRIED_CANDIDATES", 1)
    hurried = fresh(cache, "hybrid", budget=0.2)
    assert hurried.timed == 1
    few = fresh(cache, "hybrid")
    assert few.timed > 0
    assert hurried.timed + few.timed <= racing.HYBRID_CANDIDATES
    first = fresh(cache)
    assert few.timed < first.timed < len(SIZES) ** 2 / 2
    assert "grid" in {name.partition("[")[0] for name in first.facts}
    monkeypatch.setattr(lookup, "CandidateSet", None)  # nobody lists the grid to learn that nothing is left
    for mode in ("profile", "hybrid", "heuristic", "cached"):
        assert (fresh(cache, mode).timed, fresh(cache, mode).source) == (0, "cache")


def test_what_is_likely_to_win_has_its_turn_first(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget may be spent by then."""
    monkeypatch.setattr(Grid, "estimate", lambda self, layer, device, params: 1e-9 * params["BM"])
    Scripted.blocks.clear()
    fresh(cache)
    *grid, last = Scripted.blocks[0]
    assert last == Candidate("numpy.direct")
    assert [c.params["BM"] for c in grid] == sorted(c.params["BM"] for c in grid)
    assert len(grid) > 1


def test_a_grid_that_changed_is_searched_again_against_the_incumbents(cache: TuningCache) -> None:
    fresh(cache)
    again = fresh(cache, version="2")
    assert again.timed > racing.HYBRID_CANDIDATES
    assert fresh(cache, version="2").timed == 0


def test_what_there_was_no_memory_for_is_timed_when_there_is(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known beforehand; and the search ends without it."""
    scarce = True
    monkeypatch.setattr(Grid, "workspace_bytes", lambda self, layer, device, params: params["BM"])
    monkeypatch.setattr(CPU, "memory_available", lambda self: 2 * 16 if scarce else 1 << 40)
    first = fresh(cache)
    starved = {name for name, facts in first.facts.items() if facts.starved}
    assert starved == {name for name in first.facts if (BM := Candidate.parse(name).params.get("BM")) and int(BM) > 16}
    assert starved
    assert fresh(cache).source == "cache"
    scarce = False
    later = fresh(cache)
    assert all(later.facts[name].timed for name in starved)
    assert fresh(cache).source == "cache"


def test_what_nearby_layers_have_taught_comes_first(cache: TuningCache) -> None:
    def first_found(layer: ConvLayer) -> float:
        """The best of the first block."""
        Scripted.blocks.clear()
        fresh(cache, layer=layer)
        return min(seconds(candidate) for candidate in Scripted.blocks[0] if candidate.items)

    best = min(seconds(cut(BM, BN)) for BM, BN in itertools.product(SIZES, SIZES))
    assert first_found(LAYER) > 1.02 * best
    assert first_found(LAYER.replace(R=5, S=5, padding=2)) > 1.02 * best  # of another kind
    assert first_found(LAYER.replace(H=900)) > 1.02 * best  # too far
    assert first_found(LAYER.replace(W=7)) <= 1.02 * best


def test_what_nearby_layers_have_taught_is_expected(cache: TuningCache) -> None:
    """Of a layer that nobody has timed; what was expected before is not kept, nor is it of layers unlike those."""
    near, unlike = LAYER.replace(W=7), LAYER.replace(R=5, S=5, padding=2)
    unaware = fresh(cache, "heuristic", layer=near).candidate
    assert unaware == fresh(cache, "heuristic", layer=unlike).candidate == Candidate("numpy.direct")
    fresh(cache)
    made = fresh(cache, "heuristic", layer=near)
    assert (made.source, made.timed) == ("heuristic", 0)
    assert seconds(made.candidate) <= 1.02 * min(seconds(cut(BM, BN)) for BM, BN in itertools.product(SIZES, SIZES))
    assert made.ranking[0] == str(made.candidate)
    assert fresh(cache, "heuristic", layer=near).candidate == made.candidate
    assert fresh(cache, "heuristic", layer=unlike).candidate == unaware


def test_what_a_nearby_layer_teaches_is_found_once_for_all_limits_until_it_is_timed_again(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = list[ConvLayer](), nearby._lessons
    monkeypatch.setattr(nearby, "_lessons", lambda request, layer: asked.append(layer) or found(request, layer))
    fresh(cache)

    def listed(**options: Any) -> list[ConvLayer]:
        asked.clear()
        for limit in (None, 1 << 20):
            fresh(cache, "heuristic", layer=LAYER.replace(W=7), vendors=False, workspace_limit=limit, **options)
        return asked

    with lookup.shared_across_limits():
        assert listed() == [LAYER]
        assert listed(deterministic=True) == []
        fresh(cache, again=True)
        assert listed() == [LAYER]
    assert listed(allow_tf32=True) == [LAYER] * 2


def test_hybrid_times_what_won_on_a_nearby_layer_and_no_more_when_others_come(cache: TuningCache) -> None:
    """Though the estimates say nothing of it; here that of the same layer at another batch size, and of a stranger."""
    winner = fresh(cache, layer=LAYER.replace(N=8)).candidate
    fresh(cache, layer=LAYER.replace(R=5, S=5, padding=2))
    Scripted.blocks.clear()
    few = fresh(cache, "hybrid")
    assert winner in Scripted.blocks[0][: racing.FEWEST_READY]
    assert few.candidate == winner
    assert few.timed <= racing.HYBRID_CANDIDATES + 1
    fresh(cache, layer=LAYER.replace(H=7))  # from which there is something else to learn
    assert fresh(cache, "hybrid").timed == 0


def test_a_hurried_hybrid_reaches_the_least_estimate_as_well_as_a_winner_nearby(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it may have time for no more than two."""
    winner = fresh(cache, layer=LAYER.replace(N=8)).candidate
    monkeypatch.setattr(
        Grid, "estimate", lambda self, layer, device, params: 1e-6 + 1e-10 * params["BM"] * params["BN"]
    )
    Scripted.blocks.clear()
    fresh(cache, "hybrid", budget=0.1)
    assert Scripted.blocks[0][: racing.FEWEST_READY] == [cut(min(SIZES), min(SIZES)), winner]


def test_who_won_before_its_algorithm_changed_is_among_the_first(cache: TuningCache) -> None:
    """On a layer nearby, and on the layer itself: there before an incumbent that is far behind."""
    winner = fresh(cache).candidate
    for layer in (LAYER.replace(N=8), LAYER):
        Scripted.blocks.clear()
        few = fresh(cache, "hybrid", version="2", layer=layer)
        assert winner == few.candidate
        assert winner in Scripted.blocks[0][: racing.FEWEST_READY]
    assert str(Scripted.blocks[0][-1]) == "numpy.direct"


def test_a_winner_elsewhere_that_limits_refuse_or_a_grid_lacks_has_its_like_timed_or_none(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = fresh(cache, layer=LAYER.replace(N=8)).candidate
    monkeypatch.setattr(Grid, "workspace_bytes", lambda self, layer, device, params: params["BM"])
    few = fresh(cache, "hybrid", workspace_limit=int(winner.params["BM"]) - 1)
    assert str(winner) not in few.facts
    near = [Candidate.parse(name) for name in few.facts if name.startswith("grid")]
    assert any(1 < int(winner.params["BM"]) / int(c.params["BM"]) < 2 for c in near)
    other = LAYER.replace(N=2)
    monkeypatch.setattr(Grid, "candidates", lambda self, layer, device: [{"BM": 1, "BN": 64}])
    assert set(fresh(cache, "hybrid", layer=other).facts) == {"grid[BM=1,BN=64]", "numpy.direct"}


def test_each_more_of_the_few_errs_less_than_half_as_much_but_not_at_any_price() -> None:
    one = CPU.current()
    device = GridCPU(one.threads, one.instruction_set)
    offered = CandidateSet(LAYER, device, registry.algorithms(device), frozenset())
    near, alike, finer, finest = cut(4, 4), cut(5, 4), cut(6, 4), cut(7, 4)
    offered.expected = {
        finest: Facts("1", time=1.6e-3, error=1e-8),
        near: Facts("1", time=1e-3, error=3e-7),
        alike: Facts("1", time=1.2e-3, error=2e-7),
        finer: Facts("1", time=1.4e-3, error=1.4e-7),
    }
    assert offered.few(Limits(), 1) == [near, finer]


def test_only_hybrid_with_a_budget_has_no_more_prepared_than_it_has_time_for(cache: TuningCache) -> None:
    for mode, budget, layer in (("hybrid", 0.5, LAYER), ("hybrid", None, LAYER.replace(N=2)), ("profile", 0.5, LAYER)):
        fresh(cache, mode, layer=layer, budget=budget)
    assert [one["preparing"] for one in Scripted.options[-3:]] == [0.5 * racing.PREPARING, None, None]


def test_a_budget_ends_a_search_and_a_larger_one_goes_on(cache: TuningCache) -> None:
    short = fresh(cache, budget=0.0)
    assert any(facts.unreached for facts in short.facts.values())
    assert fresh(cache, budget=0.0).timed == 0
    longer = fresh(cache)
    assert longer.timed > 0
    assert fresh(cache).timed == 0


def test_a_search_in_a_worker_is_the_same(cache: TuningCache) -> None:
    """With parallel compilation there."""
    layer = ConvLayer(N=1, C=4, H=5, W=5, K=8, R=1, S=1)
    made = plan(layer, cache=cache, isolate=True, vendors=False, device=CPU.current(2))
    assert made.timed >= 6
    assert {facts.failure for facts in made.facts.values()} == {None}
