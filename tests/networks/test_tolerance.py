"""A tolerance for a whole network: what errors of layers come to, and which of them may err."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs import agree, convolution, filters, image

import autoconv
from autoconv import registry
from autoconv.accuracy import exact_error
from autoconv.bench.gpu.predicted import GPUS
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice import choose, layout_choice, tolerance
from autoconv.networks.choice.candidate import best_in_network, finer_error
from autoconv.networks.choice.choose import plan_alone, plans_for
from autoconv.networks.choice.errors import EXACT, Price, combined, sensitivities
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.tolerance import check_error, chosen_within, priced_in_parts
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Conv, Reduce, TensorType
from autoconv.networks.passes.batch_split import split
from autoconv.networks.run.memory import Views
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.tuning.candidates import UNUSUAL, expected
from autoconv.tuning.planner import forget_plans
from autoconv.tuning.staleness import note

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


class Pretended:
    """Plans of candidates that were never run: seconds and errors of each, by the width of a layer's output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, facts: dict[int, dict[str, tuple[float, float]]]) -> None:
        self.facts, self.exact = facts, dict[int, tuple[float, float]]()
        self.others, self.asked = dict[int, dict[str, tuple[float, float]]](), dict[int, set[float]]()
        for module in (choose, layout_choice, tolerance):
            monkeypatch.setattr(module, "plan", self.plan)

    def plan(self, layer: ConvLayer, mode: str, **options: Any) -> Any:
        if layer.layout == "NHWC":
            raise PlanError("nothing recorded")
        assert "memory_limit" not in options
        others = {}
        untimed = "winograd[m=4]" if "tolerance" in options else "winograd[m=7]"  # by estimates
        if "tolerance" in options and mode == "heuristic":
            assert not self.facts[layer.K]
            self.asked.setdefault(layer.K, set()).add(options["tolerance"])
        elif "tolerance" in options:
            assert mode in ("profile", "hybrid")
            self.asked.setdefault(layer.K, set()).add(options["tolerance"])
            allowed = {name: of for name, of in self.others.get(layer.K, {}).items() if of[1] <= options["tolerance"]}
            others = {name: of for name, of in allowed.items() if name not in self.facts[layer.K]}
            self.facts[layer.K] = self.facts[layer.K] | others
        if options.get("exact") and mode in ("profile", "hybrid"):
            self.facts[layer.K]["gemm[TK=1]"] = self.exact[layer.K]
        known = {name: Facts("", time=t, error=e, samples=9) for name, (t, e) in self.facts[layer.K].items()}
        timings = {name: facts.time for name, facts in known.items()}
        ranking = sorted(timings, key=timings.__getitem__)
        chosen = mode if mode in timings else next(iter(ranking), "gemm[TK=4]" if options.get("exact") else untimed)
        limits = SimpleNamespace(weights=options.get("weights"))
        return SimpleNamespace(
            layer=layer, candidate=chosen, ranking=ranking, timings=timings, facts=known, limits=limits,
            kernel=SimpleNamespace(workspace_bytes=0), timed=len(others),
        )  # fmt: skip


def chain(widths: list[int], batch: int = 1) -> Graph:
    graph, value = image(batch=batch)
    for n, K in enumerate(widths):
        value = convolution(graph, f"c{n}", value, K)
    graph.outputs["y"] = value
    return graph


def within(graph: Graph, tmp_path: Path, mode: str = "heuristic", **options: Any) -> dict[str, Any]:
    asked = NetworkOptions.of({"cache": TuningCache(tmp_path, None), **options})
    in_nhwc, prices, _ = chosen_within(graph, CPU.current(), asked, mode)
    assert in_nhwc == frozenset()
    return plans_for(split(graph, {}), Views(graph), CPU.current(), asked, {}, "heuristic", prices)


def spent(plans: dict[str, Any], weights: dict[str, float]) -> tuple[float, float]:
    """The seconds and the error of what is chosen."""
    errors = {name: made.facts[made.candidate].error for name, made in plans.items()}
    return sum(made.timings[made.candidate] for made in plans.values()), combined(errors, weights)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_faster_errs_as_little(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    widths = [8, 16, 24, 32, 40]
    facts = {
        K: {
            f"winograd[m={m}]": (float(rng.uniform(1, 4)) / (m + 2), 1e-7 * float(rng.uniform(1, 2)) * m**2)
            for m in range(1, 5)
        }
        for K in widths
    }
    Pretended(monkeypatch, facts)
    graph = chain(widths)
    weights, names = sensitivities(graph), list(graph.nodes)
    every = []
    for picked in itertools.product(*(facts[K].values() for K in widths)):
        errors = {name: e for name, (_, e) in zip(names, picked, strict=True)}
        every.append((sum(t for t, _ in picked), combined(errors, weights)))
    least, fastest = min(e for _, e in every), min(every)
    for limit in np.geomspace(least * 1.01, fastest[1], 4).tolist():
        plans = within(graph, tmp_path, tolerance=limit)
        time, error = spent(plans, weights)
        assert error <= limit * (1 + 1e-9)
        assert time <= 1.1 * min(t for t, e in every if e <= limit)
        with monkeypatch.context() as patch:
            patch.setattr(tolerance, "HALVINGS", 0)
            at_a_price, error = spent(within(graph, tmp_path, tolerance=limit), weights)
        assert time <= at_a_price <= min(t for t, e in every if e <= error) * (1 + 1e-9)
    plans = within(graph, tmp_path, tolerance=2 * fastest[1])
    assert sum(made.timings[made.candidate] for made in plans.values()) == pytest.approx(fastest[0])


def test_what_a_price_leaves_of_the_limit_is_spent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four layers that are alike none takes the quicker tile at a price at which not all of them do."""
    for number in range(5):
        Pretended(monkeypatch, {4: {"winograd[m=7]": (1.0, 1e-5), "winograd[m=2]": (2.0, 1e-6)}})
        graph = chain([4] * 4)
        errors = {name: 1e-5 if n < number else 1e-6 for n, name in enumerate(graph.nodes)}
        limit = combined(errors, sensitivities(graph)) * (1 + 1e-9)
        plans = within(graph, tmp_path / str(number), tolerance=limit)
        assert sum(made.timings[made.candidate] for made in plans.values()) == 8 - number


def test_an_error_has_its_price_once_for_all_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, {8: {"winograd[m=7]": (1.0, 1e-5), "winograd[m=2]": (2.0, 1e-6)}})
    graph = Graph("net")
    graph.outputs["y"] = convolution(graph, "c0", graph.add_input("x", TensorType((4, 4, 7, 7))), 8)
    price = 3 / (1e-10 - 1e-12)  # so that the smaller tile is worth 3 more seconds in all, and no more
    for images, wanted in (({}, "winograd[m=2]"), ({"c0": 2}, "winograd[m=2]"), ({"c0": 1}, "winograd[m=7]")):
        parts = split(graph, images)
        plans = plans_for(
            parts, Views(parts.graph), CPU.current(), NetworkOptions.of({}), {}, "heuristic", {"c0": Price(price)}
        )
        assert plans["c0"].candidate == wanted


@pytest.mark.parametrize("seed", range(10))
def test_without_a_limit_little_time_is_given_for_less_error(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    widths = [8, 16, 24, 32, 40]
    facts = {
        K: {f"winograd[m={m}]": (float(rng.uniform(1, 1.2)), 1e-8 * float(rng.uniform(1, 38))) for m in range(1, 5)}
        for K in widths
    }
    Pretended(monkeypatch, facts)
    graph = chain(widths)
    plans = within(graph, tmp_path)
    fastest = {f"c{n}": min(facts[K].values()) for n, K in enumerate(widths)}
    least = sum(time for time, _ in fastest.values())
    most = combined({name: error for name, (_, error) in fastest.items()}, sensitivities(graph))
    time = sum(made.timings[made.candidate] for made in plans.values())
    error = combined({name: made.facts[made.candidate].error for name, made in plans.items()}, sensitivities(graph))
    assert time <= least * (1 + tolerance.SPARED * (1 - (error / most) ** 2)) * (1 + 1e-9)
    assert error < most


def test_where_the_fastest_errs_too_much_others_as_exact_as_the_chosen_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = {"winograd[m=7]": (1.0, 1e-5), "winograd[m=4]": (1.4, 3e-7)}
    pretended = Pretended(monkeypatch, {8: dict(known), 16: {"direct": (1.0, 1e-7)}})
    pretended.others[8] = {"winograd[m=4,rows=2]": (1.2, 3e-7)}
    graph = chain([8, 16])
    for mode, wanted in (("heuristic", "winograd[m=4]"), ("hybrid", "winograd[m=4,rows=2]")):
        assert within(graph, tmp_path, mode)["c0"].candidate == wanted
    assert set(pretended.asked) == {8}
    assert 3 * 3e-7 < min(pretended.asked[8]) < 3 * 6e-7, "three times what is usual"
    pretended.asked.clear()
    within(graph, tmp_path, "hybrid", tolerance=math.inf)
    assert not pretended.asked


def test_what_errs_less_than_the_fastest_and_more_than_the_chosen_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = {"winograd[m=7]": (1.0, 1e-5), "direct": (9.0, 4e-8)}
    pretended = Pretended(monkeypatch, {8: dict(known)})
    pretended.others[8] = {"winograd[m=4]": (1.4, 3e-7)}
    graph = chain([8])
    for mode, wanted in (("heuristic", "direct"), ("hybrid", "winograd[m=4]")):
        assert within(graph, tmp_path, mode)["c0"].candidate == wanted


def test_finer_forms_are_asked_for_where_they_might_win() -> None:
    facts = {
        "winograd[m=7x7,rows=1,coop=0]": Facts("", time=1.0, error=1e-5),
        "winograd[m=4x4,rows=1,coop=0]": Facts("", time=1.5, error=1e-6),
    }
    timings = {name: known.time for name, known in facts.items()}
    layer = ConvLayer(N=1, C=128, H=28, W=28, K=128, R=3, S=3, padding=1)
    made: Any = SimpleNamespace(layer=layer, candidate="", ranking=[*facts], timings=timings, facts=facts)
    low, high, higher = (seconds / 1e-10 for seconds in (0.1, 0.6, 5.0))
    assert finer_error(made, CPU.current(), Price(low, mixed=False)) == pytest.approx(0.6e-5, rel=0.1), (
        "as the price makes it worth some"
    )
    assert finer_error(made, CPU.current(), Price(high, mixed=False)) == pytest.approx(0.6e-5, rel=0.1)
    assert finer_error(made, CPU.current(), Price(higher, mixed=False)) == pytest.approx(0.6e-6, rel=0.1), (
        "where the other is chosen"
    )
    for name in [*facts]:
        form = name.replace("]", ",terms=32]")
        facts[form], timings[form] = Facts("", time=9.0, error=1e-9), 9.0
    made.ranking = [*facts]
    assert finer_error(made, CPU.current(), Price(high, mixed=False)) is None, "as they were timed"


USUAL = {"winograd[m=7]": (1.0, 1e-5), "winograd[m=4]": (1.4, 5e-7), "direct": (2.0, 1e-7)}


def test_the_documentation_states_the_limit() -> None:
    pages = Path(__file__).parents[2] / "docs" / "pages"
    for text in (
        autoconv.load.__doc__,
        *((pages / f"{name}.md").read_text() for name in ("how-it-chooses", "accuracy")),
    ):
        assert f"{EXACT:g} times what" in str(text)


def test_without_a_limit_a_network_errs_a_few_times_what_exact_algorithms_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Pretended(monkeypatch, {8: dict(USUAL), 16: dict(USUAL)})
    graph = chain([8, 16])
    for options, wanted in (
        ({}, "winograd[m=4]"),
        ({"tolerance": math.inf}, "winograd[m=7]"),
        ({"allow_tf32": True}, "winograd[m=7]"),
    ):
        plans = within(graph, tmp_path, **options)
        assert {made.candidate for made in plans.values()} == {wanted}
    exact = {name: exact_error(made.layer) for name, made in plans.items()}
    most = combined(dict.fromkeys(plans, 5e-07), sensitivities(graph))
    assert most <= EXACT * combined(exact, sensitivities(graph)) < 2 * most


def test_prices_are_of_worst_places_where_a_network_has_images_as_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Pretended(monkeypatch, {8: dict(USUAL), 16: dict(USUAL)})
    options = NetworkOptions.of({"cache": TuningCache(tmp_path, None)})
    graph = chain([8, 16])
    for mixed in (False, True):
        prices = chosen_within(graph, CPU.current(), options, "heuristic").prices
        assert {name: price.mixed for name, price in prices.items()} == {"c0": mixed, "c1": mixed}
        graph.outputs["y"] = graph.add("mean", Reduce("mean", (2, 3)), graph.outputs["y"])


def test_what_rounds_more_than_float32_has_no_limit_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Pretended(monkeypatch, {8: dict(USUAL)})
    graph = Graph("net")
    x = graph.add_input("x", TensorType((1, 4, 7, 7), "float16"))
    weights = graph.add_constant("w", filters(8, 4, 1, 1).astype(np.float16))
    graph.outputs["y"] = graph.add("c0", Conv(), x, weights)
    assert within(graph, tmp_path)["c0"].candidate == "winograd[m=7]"


def test_tuning_times_exact_candidates_where_the_usual_limit_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph = chain([8])
    pretended = Pretended(monkeypatch, {8: {"winograd[m=7]": (1.0, 1e-5), "winograd[m=6]": (1.1, 9e-6)}})
    pretended.exact = {8: (9.0, 1e-7)}
    assert within(graph, tmp_path)["c0"].candidate == "winograd[m=6]"  # the least that is on record
    assert within(graph, tmp_path, "hybrid")["c0"].candidate == "gemm[TK=1]"


def test_where_a_layer_has_no_facts_the_others_are_the_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = {"winograd[m=7]": (1.0, 1e-5), "winograd[m=2]": (1.001, 1e-7)}
    Pretended(monkeypatch, {8: both, 16: both})
    assert within(chain([8, 16]), tmp_path)["c0"].candidate == "winograd[m=2]"
    Pretended(monkeypatch, {8: {"winograd[m=7]": (1.0, 1e-8), "winograd[m=2]": (1.001, 1e-9)}, 16: {}})
    monkeypatch.setattr(tolerance, "error_by", lambda made, name, device, mixed: 1e-8)
    assert within(chain([8, 16]), tmp_path)["c0"].candidate == "winograd[m=7]"


@pytest.mark.parametrize("timed", [{}, {"winograd[m=7]": (1.0, 1e-8)}], ids=["nothing", "another layer"])
def test_what_nobody_timed_errs_no_more_than_a_network_may(
    timed: dict[str, tuple[float, float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless told otherwise: then each layer does; where a caller says what it may be, exact algorithms run."""
    graph = chain([8, 16])
    pretended = Pretended(monkeypatch, {8: {}, 16: timed})
    errors = {"winograd[m=7]": 1e-8, "winograd[m=4]": 2e-7, "gemm[TK=4]": 1e-9}
    monkeypatch.setattr(tolerance, "error_by", lambda made, name, device, mixed: errors[name])
    assert within(graph, tmp_path)["c0"].candidate == "winograd[m=7]"
    assert not pretended.asked
    errors["winograd[m=7]"] = 1e-3
    assert within(graph, tmp_path)["c0"].candidate == "winograd[m=4]"
    layer = ConvLayer(N=1, C=4, H=7, W=7, K=8, R=1, S=1)
    assert pretended.asked[8] == {UNUSUAL * EXACT * exact_error(layer)}
    assert within(graph, tmp_path, tolerance=1e-9)["c0"].candidate == "gemm[TK=4]"
    assert not pretended.exact


def test_on_a_gpu_what_nobody_timed_has_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretended = Pretended(monkeypatch, {8: {}, 16: {}})
    options = NetworkOptions.of({"cache": TuningCache(tmp_path, None)})
    found = chosen_within(chain([8, 16]), GPUS[0], options, "heuristic")
    assert not found.prices
    assert not pretended.asked


def test_tuning_times_exact_candidates_where_none_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph = chain([8, 16])
    pretended = Pretended(
        monkeypatch, {K: {"winograd[m=7]": (1.0, 1e-5), "winograd[m=2]": (3.0, 2e-6)} for K in (8, 16)}
    )
    pretended.exact = {8: (9.0, 1e-7), 16: (2.0, 1e-7)}
    limit = combined(dict.fromkeys(graph.nodes, 1.5e-6), sensitivities(graph))
    least = combined(dict.fromkeys(graph.nodes, 2e-6), sensitivities(graph))
    with pytest.raises(PlanError, match=f"net: tolerance={limit}: expected at least {least:.1e}, which the most exact"):
        within(graph, tmp_path, tolerance=limit)
    plans = within(graph, tmp_path, "hybrid", tolerance=limit)
    assert {name: made.candidate for name, made in plans.items()} == {"c0": "winograd[m=2]", "c1": "gemm[TK=1]"}
    assert all("gemm[TK=1]" in known for known in pretended.facts.values())
    with pytest.raises(PlanError, match=r"tolerance=1e-12: expected at least .* most exact candidates"):
        within(graph, tmp_path, "hybrid", tolerance=1e-12)


def test_numpy_keeps_no_tolerance_where_others_compute_a_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it runs no such layer in a network: what the others come to at least is told."""
    graph = chain([8])
    Pretended(monkeypatch, {8: {"winograd[m=7]": (1.0, 1e-5), "direct": (2.0, 1e-7), "numpy.gemm": (3.0, 1e-9)}})
    limit, least = (combined({"c0": error}, sensitivities(graph)) for error in (1e-8, 1e-7))
    with pytest.raises(PlanError, match=f"expected at least {least:.1e}, which the most exact"):
        within(graph, tmp_path, tolerance=limit)
    assert within(graph, tmp_path, tolerance=1.01 * least)["c0"].candidate == "direct"


def test_other_limits_may_leave_nothing_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, {8: {"winograd[m=7]": (1.0, 1e-5)}})
    graph = chain([8])
    plans = {
        "c0": plan_alone(graph, graph.nodes["c0"], ConvLayer(N=1, C=4, H=7, W=7, K=8, R=1, S=1), "cached", {}, 0.0)
    }
    check_error(graph, plans, CPU.current(), NetworkOptions.of({"tolerance": 1e-4}))
    with pytest.raises(PlanError, match=r"net: tolerance=1e-09: expected at least .* under the other limits"):
        check_error(graph, plans, CPU.current(), NetworkOptions.of({"tolerance": 1e-9}))


@pytest.mark.parametrize("wrong", [-1e-6, float("nan"), "1e-6", True, np.complex64(1)])
def test_a_tolerance_is_a_number(wrong: Any, tmp_path: Path) -> None:
    options = {"vendors": False, "cache": TuningCache(tmp_path, None), "tolerance": wrong}
    with pytest.raises(
        PlanError, match=rf"tolerance={re.escape(repr(wrong))}: expected a number of at least 0, or None"
    ):
        CompiledNetwork(chain([8]), CPU.current(), options)


def test_error_costs_what_its_price_says() -> None:
    facts = {"a": Facts("", time=1.0, error=3e-6), "b": Facts("", time=1.5, error=1e-6)}
    timings = {name: known.time for name, known in facts.items()}
    layer = ConvLayer(N=1, C=4, H=7, W=7, K=8, R=1, S=1)
    made: Any = SimpleNamespace(layer=layer, candidate="a", ranking=["a", "b"], timings=timings, facts=facts)
    for price, best in ((0.0, "a"), (0.6e11, "a"), (0.65e11, "b")):
        assert best_in_network(made, CPU.current(), Price(price)) == best


@kernels
def test_a_saved_network_that_errs_too_much_is_chosen_anew(tmp_path: Path) -> None:
    graph, x = image()
    weights = graph.add_constant("w", filters(8, 4, 3, 3))
    graph.outputs = {"y": graph.add("y", Conv(), x, weights)}
    device, cache = CPU.current(), TuningCache(tmp_path, None)
    options = {"vendors": False, "cache": cache}
    net = CompiledNetwork(graph, device, options).tune("winograd")
    plans = [net.plans["y"], CompiledNetwork(graph, device, options).tune("direct").plans["y"]]
    algorithms = {algorithm.name: algorithm for algorithm in registry.algorithms(device)}
    facts = {
        made.candidate: replace(
            expected(algorithms[made.candidate.algorithm], made.layer, device, made.candidate),
            time=time, pack=0.0, error=error, samples=9,
        )
        for made, time, error in zip(plans, (1e-3, 2e-3), (1e-6, 1e-7), strict=True)
    }  # fmt: skip
    covers = note(list(algorithms.values()))
    race = Race("0" * 32, "2026-01-01T00:00:00+00:00", device.versions, False, None, facts, covers)
    cache.add(plans[0].layer.key(), device.key, race)
    forget_plans()
    path = tmp_path / "net.autoconv"
    net.save(path)
    large, small = (combined({"y": error}, sensitivities(graph)) for error in (1e-6, 1e-7))
    for limit, best in ((2 * large, "winograd"), (2 * small, "direct")):
        again = autoconv.load(path, tolerance=limit, cache=cache)
        assert again.plans["y"].candidate.algorithm == best
        assert again.error <= limit
    with pytest.raises(PlanError, match=r"expected at least .*, which the most exact candidates"):
        autoconv.load(path, tolerance=small / 2, cache=cache)


@kernels
def test_a_network_is_tuned_to_a_tolerance(tmp_path: Path) -> None:
    graph = chain([8])
    options = {"vendors": False, "cache": TuningCache(tmp_path, None), "exact": True}
    net = CompiledNetwork(graph, CPU.current(), options).tune("hybrid", tolerance=1e-5, budget=0.02)
    assert 0 < net.error <= 1e-5
    assert f"an error of {net.error:.1e} expected" in net.explain()
    agree(net, graph, 1e-5)
    before = net.plans
    with pytest.raises(PlanError, match="net: tolerance=1e-10: expected at least"):
        net.tune("hybrid", tolerance=1e-10)
    assert net.plans is before
    with pytest.raises(PlanError, match="net: tolerance=1e-10: expected at least"):
        CompiledNetwork(graph, CPU.current(), {**options, "tolerance": 1e-10})


class PretendedInParts(Pretended):
    """The same, of layers of one image in place of eight by other facts."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        whole: dict[str, tuple[float, float]],
        single: dict[str, tuple[float, float]],
    ) -> None:
        super().__init__(monkeypatch, {})
        self.by_images = {8: whole, 1: single}

    def plan(self, layer: ConvLayer, mode: str, **options: Any) -> Any:
        self.facts = {layer.K: self.by_images[layer.N]}
        return super().plan(layer, mode, **options)


def test_parts_of_a_batch_keep_the_limit_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a coarse candidate gains more on one image than on all, the whole batch's prices do not keep it out."""
    graph, device = chain([8, 16], batch=8), CPU.current()
    fine, coarse = "winograd[m=4]", "winograd[m=7]"
    whole = {fine: (8.0, 1e-7), coarse: (7.9, 1e-5)}
    PretendedInParts(monkeypatch, whole, {fine: (1.0, 1e-7), coarse: (0.5, 1e-5)})
    weights = sensitivities(graph)
    most = combined(dict.fromkeys(weights, 2e-7), weights)
    options = NetworkOptions.of({"cache": TuningCache(tmp_path, None), "tolerance": most})
    chosen = chosen_within(graph, device, options, "heuristic")
    images = {"c0": 1, "c1": 1}
    parts = split(graph, images)

    def error(prices: dict[str, Price]) -> float:
        plans = plans_for(parts, Views(parts.graph), device, options, {}, "heuristic", prices)
        return spent(plans, weights)[1]

    assert error(chosen.prices) > chosen.limit
    priced = priced_in_parts(graph, device, options, "heuristic", chosen, images)
    assert priced is not None
    assert error(priced.prices) <= priced.limit == chosen.limit
    assert priced_in_parts(graph, device, options, "heuristic", chosen, {}) == chosen
    PretendedInParts(monkeypatch, whole, {coarse: (0.5, 1e-5)})  # nothing finer is on record
    assert priced_in_parts(graph, device, options, "heuristic", chosen, images) is None
