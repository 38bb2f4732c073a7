"""Layouts: graphs in which some arrays are in NHWC, and their choice together with candidates."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs import agree, compiled, drawn, filters, small

from autoconv.cpu import pool
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.device import CPU
from autoconv.errors import CacheWarning, ConfigError, PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice import layout_choice
from autoconv.networks.choice.layout_choice import arrays_in_nhwc
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.times import OperatorTimes
from autoconv.networks.compiled import listing, saved
from autoconv.networks.compiled.loading import load
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Concat, Conv, Elementwise, Pad, Pool, Reduce, Resize, TensorType, Transpose
from autoconv.networks.passes import optimized
from autoconv.networks.passes.layouts import channels_last, laid_out
from autoconv.networks.reference import evaluate
from autoconv.networks.run.planned import Choices
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts
from autoconv.tuning.planner import forget_plans, plan, resolved_cache

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
AB = Choices(in_nhwc=frozenset({"a", "b"}))
TWICE = tuple((n // 2,) for n in range(10))


def mixed() -> Graph:
    """A graph with all that can be in NHWC, whose input is taken by several."""
    graph = Graph("mixed")
    x = graph.add_input("x", TensorType((1, 8, 5, 6)))
    weights = (graph.add_constant(f"w{n}", filters(8, 8, 1, 1)) for n in range(4))
    a = graph.add("a", Conv(activation="relu"), x, next(weights))
    b = graph.add("b", Conv(residual=True), a, next(weights), x)
    c = graph.add("c", Elementwise(("add", ("mul", 0, 1), 2)), b, graph.add_constant("s", filters(8, 1, 1)), a)
    gate = graph.add("gate", Conv(activation="sigmoid"), graph.add("mean", Reduce("mean", (2, 3)), c), next(weights))
    d = graph.add("d", Elementwise(("mul", 0, 1)), c, gate)
    e = graph.add("e", Pool(reduction="max", window=(3, 3), padding=((1, 1), (1, 1))), d)
    f = graph.add("f", Pad((0, 0, 1, 0), (0, 0, 0, 2)), graph.add("joined", Concat(1), d, e))
    g = graph.add("g", Resize(2, TWICE, ((1.0,),) * 10), graph.add("joined.2", Concat(1), d, a, e))
    graph.outputs = {"f": f, "g": g, "e": e}
    return graph


def movable(graph: Graph) -> list[str]:
    return [name for name, node in graph.nodes.items() if channels_last(graph, node) is not None]


@pytest.mark.parametrize("graph", [mixed(), optimized(small(2))], ids=["mixed", "small"])
def test_the_answers_are_the_same_in_any_layouts(graph: Graph) -> None:
    inputs, names = drawn(graph), movable(graph)
    expected = evaluate(graph, inputs)
    rng = np.random.default_rng(0)
    sets = [names, names[:1], names[-1:]] + [[n for n in names if rng.random() < 0.5] for _ in range(20)]
    for in_nhwc in sets:
        found = laid_out(graph, in_nhwc)
        assert {name: found.types[value] for name, value in found.outputs.items()} == {
            name: graph.types[value] for name, value in graph.outputs.items()
        }
        for name, value in evaluate(found, inputs).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-12)


def test_one_conversion_serves_all() -> None:
    graph = mixed()
    assert len(movable(graph)) == len(graph.nodes)
    found = laid_out(graph, movable(graph))
    turned = [name for name, node in found.nodes.items() if isinstance(node.operator, Transpose)]
    assert sorted(turned) == ["e.NCHW", "f.NCHW", "g.NCHW", "x.NHWC"]
    assert laid_out(graph, ()) is graph


@kernels
def test_networks_run_in_any_layouts() -> None:
    for graph in (mixed(), optimized(small(2))):
        for in_nhwc in (movable(graph), movable(graph)[::2]):
            net = compiled(graph, known=Choices(in_nhwc=frozenset(in_nhwc)))
            assert net.foreign == []
            assert net.explain().count(" NHWC ") == sum(" NHWC" in s.operator for s in net.profile(**drawn(graph))) > 0
            agree(net, graph, 1e-5)


@kernels
def test_only_kernels_that_run_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the layouts and candidates that lose, though all of them are on record."""
    built: list[str] = []
    real = GeneratedAlgorithm.build

    def build(algorithm: Any, layer: ConvLayer, *rest: Any) -> Any:
        built.append(str(layer))
        return real(algorithm, layer, *rest)

    graph, options = tree([("a", "x", 3, 8)]), {"vendors": False, "cache": TuningCache(tmp_path, system=None)}
    layer = graph.nodes["a"].operator.layer([graph.types[v] for v in graph.nodes["a"].inputs])  # type: ignore[attr-defined]
    for layout in ("NCHW", "NHWC"):
        plan(layer.replace(layout=layout), "hybrid", weights="constant", budget=0.01, **options)
    forget_plans()
    monkeypatch.setattr(GeneratedAlgorithm, "build", build)
    net = CompiledNetwork(graph, CPU.current(), options)
    assert built == [str(made.layer) for made in net.plans.values()]


class Times:
    """Pretended seconds of everything, by text: those on record, and those that timing would find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorded: Mapping[str, float], truth: Mapping[str, float]):
        self.recorded, self.truth, self.timed = dict(recorded), dict(truth), list[str]()
        monkeypatch.setattr(layout_choice, "plan", self.plan)
        monkeypatch.setattr(layout_choice, "noise", lambda a, b: 0.0)
        monkeypatch.setattr(layout_choice.OperatorTimes, "seconds", self.seconds)
        monkeypatch.setattr(layout_choice, "least_estimate", lambda layer, device: 1.0)

    def plan(self, layer: ConvLayer, mode: str, **options: Any) -> Any:
        key = f"gemm[C={layer.C},K={layer.K},layout={layer.layout}]"
        if key not in self.recorded and mode == "cached":
            raise PlanError("nothing recorded")
        if mode == "profile" and key not in self.recorded:
            self.recorded[key] = self.truth[key]
            self.timed.append(key)
        facts = {name: Facts("", time=seconds, samples=25) for name, seconds in self.recorded.items()}
        return SimpleNamespace(layer=layer, candidate=key, ranking=[key], timings=self.recorded, facts=facts)

    def seconds(self, operator: Any, types: Any) -> float:
        return 1.0 if isinstance(operator, Transpose) else 0.0


def asked(folder: Path) -> NetworkOptions:
    return NetworkOptions.of({"cache": TuningCache(folder, None)})


def tree(channels: Collection[tuple[str, str, int, int]]) -> Graph:
    """1x1 convolutions, each of an array that is named; what nobody takes is an output."""
    graph = Graph("tree")
    graph.add_input("x", TensorType((1, 3, 4, 4)))
    for name, source, C, K in channels:
        graph.add(name, Conv(), source, graph.add_constant(f"w.{name}", filters(K, C, 1, 1)))
    taken = {value for node in graph.nodes.values() for value in node.inputs}
    graph.outputs = {name: name for name in graph.nodes if name not in taken}
    return graph


TREE = tree([("a", "x", 3, 8), ("b", "a", 8, 9), ("c", "a", 8, 10), ("d", "b", 9, 11), ("e", "c", 10, 12)])


def seconds(graph: Graph, in_nhwc: Collection[str], times: Mapping[str, float]) -> float:
    """What a choice costs, by the graph that it makes: a second for each conversion."""
    found = laid_out(graph, in_nhwc)
    layers = [node.operator.layer([found.types[v] for v in node.inputs]) for node in found.nodes.values()
              if isinstance(node.operator, Conv)]  # fmt: skip
    turns = sum(isinstance(node.operator, Transpose) for node in found.nodes.values())
    return turns + sum(times[f"gemm[C={layer.C},K={layer.K},layout={layer.layout}]"] for layer in layers)


def keys(graph: Graph, layout: str) -> list[str]:
    return [f"gemm[C={s[1]},K={s[0]},layout={layout}]" for name, value in graph.constants.items() if (s := value.shape)]


def every(graph: Graph) -> list[tuple[str, ...]]:
    names = movable(graph)
    return [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


@pytest.mark.parametrize("seed", range(12))
def test_no_other_layouts_take_less_time(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    recorded = {key: float(rng.integers(1, 30)) / 4 for layout in ("NCHW", "NHWC") for key in keys(TREE, layout)}
    Times(monkeypatch, recorded, {})
    in_nhwc = arrays_in_nhwc(TREE, CPU.current(), asked(tmp_path), "heuristic")
    assert seconds(TREE, in_nhwc, recorded) == min(seconds(TREE, other, recorded) for other in every(TREE))


@pytest.mark.parametrize("seed", range(6))
def test_only_layers_that_may_gain_are_timed(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    first = dict.fromkeys(keys(TREE, "NCHW"), 10.0)
    truth = {key: float(rng.choice([7.0, 9.5, 12.0])) for key in keys(TREE, "NHWC")}
    times = Times(monkeypatch, first, truth)
    monkeypatch.setattr(layout_choice, "HOPE", 0.7)
    in_nhwc = arrays_in_nhwc(TREE, CPU.current(), asked(tmp_path), "profile")
    assert seconds(TREE, in_nhwc, first | truth) == min(seconds(TREE, other, first | truth) for other in every(TREE))
    monkeypatch.setattr(layout_choice, "HOPE", 0.95)  # half a second of each, and the fewest conversions take three
    times = Times(monkeypatch, first, truth)
    assert arrays_in_nhwc(TREE, CPU.current(), asked(tmp_path), "profile") == frozenset()
    assert times.timed == []


def test_a_layer_without_facts_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = asked(tmp_path)
    Times(monkeypatch, {}, {})
    assert arrays_in_nhwc(TREE, CPU.current(), options, "heuristic") == frozenset()
    Times(monkeypatch, dict.fromkeys(keys(TREE, "NHWC"), 0.001), {})
    assert arrays_in_nhwc(TREE, CPU.current(), options, "heuristic") == frozenset()


def test_what_may_be_noise_is_no_gain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph, options = tree([("a", "x", 3, 8)]), asked(tmp_path)
    for noise, found in ((0.3, frozenset("a")), (0.5, frozenset[str]())):
        Times(monkeypatch, {"gemm[C=3,K=8,layout=NCHW]": 10.0, "gemm[C=3,K=8,layout=NHWC]": 6.0}, {})
        monkeypatch.setattr(layout_choice, "noise", lambda a, b, noise=noise: noise)
        assert arrays_in_nhwc(graph, CPU.current(), options, "heuristic") == found


def test_limits_hold_in_either_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times, seen = Times(monkeypatch, {"gemm[C=3,K=8,layout=NCHW]": 10.0, "gemm[C=3,K=8,layout=NHWC]": 6.0}, {}), []

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Any:
        seen.append((layer.layout, options))
        return times.plan(layer, mode)

    monkeypatch.setattr(layout_choice, "plan", plan)
    limits = {"workspace_limit": 9, "deterministic": True, "cache": TuningCache(tmp_path, None)}
    whole = {"memory_limit": 1 << 20, "tolerance": 1e-5}
    arrays_in_nhwc(tree([("a", "x", 3, 8)]), CPU.current(), NetworkOptions.of({**limits, **whole}), "cached")
    assert [layout for layout, _ in seen] == ["NHWC", "NCHW"]
    assert all(
        options == {"device": CPU.current(), "weights": "constant", "build": False, **limits} for _, options in seen
    )


@kernels
def test_layouts_are_kept_with_a_network(tmp_path: Path) -> None:
    graph, path = mixed(), tmp_path / "net.autoconv"
    net = compiled(graph, known=AB)
    net.save(path)
    again = load(path)
    assert again.explain() == net.explain()
    assert "Conv NHWC" in again.explain()
    agree(again, graph, 1e-5)
    kept = saved.read(path)
    saved.write(path, kept.graph, replace(kept.choices, in_nhwc=frozenset({"gate", "nobody"})), net.device)
    with pytest.raises(ConfigError, match="nhwc: expected nodes that can be in NHWC, got nobody"):
        load(path)


@kernels
def test_what_is_explained_is_one_choice_whatever_is_chosen_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    net = compiled(mixed(), known=AB)
    expected, lines = net.explain(), listing.lines

    def lines_and_another_choice(*given: Any) -> list[listing.Line]:
        found = lines(*given)
        net._compile("heuristic", Choices())
        return found

    monkeypatch.setattr(listing, "lines", lines_and_another_choice)
    assert net.explain() == expected
    monkeypatch.undo()
    assert "NHWC" not in net.explain()


@kernels
def test_layouts_that_do_not_fit_are_not_taken() -> None:
    graph = mixed()
    all_moved = Choices(in_nhwc=frozenset(movable(graph)))
    free, first = compiled(graph, known=all_moved), compiled(graph, known=Choices())
    for limit in (free.arena_bytes, free.arena_bytes - 1, first.arena_bytes):
        net = compiled(graph, known=all_moved, memory_limit=limit)
        assert net.arena_bytes <= limit
        assert ("NHWC" in net.explain()) == (limit >= free.arena_bytes)
        agree(net, graph, 1e-5)


@kernels
def test_operators_are_timed_once(tmp_path: Path) -> None:
    cache, turn, types = TuningCache(tmp_path, None), Transpose((0, 2, 3, 1)), [TensorType((1, 8, 5, 6))]
    assert OperatorTimes(CPU.current(), cache, measure=False).seconds(turn, types) == float("inf")
    found = OperatorTimes(CPU.current(), cache, measure=True).seconds(turn, types)
    assert 0 < found < 1
    times = OperatorTimes(CPU.current(), cache, measure=False)
    assert times.seconds(turn, types) == found
    assert times.seconds(turn, [TensorType((2, 8, 5, 6))]) == float("inf")
    cache.close()


@pytest.mark.parametrize(
    "seconds", [10**400, -1.0, float("nan"), None, [], "soon"], ids=lambda seconds: str(seconds)[:4]
)
def test_a_time_that_is_none_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: object) -> None:
    times = OperatorTimes(CPU.current(), TuningCache(tmp_path, None), measure=False)
    monkeypatch.setattr("autoconv.records.kept.Kept.get", lambda self, what: {"seconds": seconds})
    assert times.seconds(Transpose((0, 2, 3, 1)), [TensorType((1, 8, 5, 6))]) == float("inf")


@kernels
def test_what_cannot_be_kept_is_remembered_by_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, types, device = Transpose((0, 2, 3, 1)), [TensorType((1, 8, 5, 6))], CPU.current()
    assert device.machine
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="this process only"):
        found = OperatorTimes(device, resolved_cache(None), measure=True).seconds(turn, types)
    assert OperatorTimes(device, resolved_cache(None), measure=False).seconds(turn, types) == found
