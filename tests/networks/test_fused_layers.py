"""Depthwise layers and their 1x1 neighbours as one node: which there are, the same answers, and which are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import agree, compiled, filters, halves

import autoconv
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.fused.geometry import FusedBlocking
from autoconv.errors import ConfigError
from autoconv.networks.choice import fused as choice
from autoconv.networks.choice.choose import planned
from autoconv.networks.choice.fused import with_fused
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Concat, Conv, Elementwise, FusedConv, Pool, TensorType
from autoconv.networks.passes.fused_layers import chains, fused
from autoconv.networks.reference import evaluate
from autoconv.networks.run.planned import Choices

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
CUT = FusedBlocking(4, 8)


def blocks(count: int = 1, batch: int = 2, C: int = 8, expansion: int = 3) -> Graph:
    """Inverted residual blocks: a 1x1 layer, a depthwise one, a 1x1 one, and the sum with what came in."""
    graph, hidden = Graph("blocks"), C * expansion
    x = graph.add_input("x", TensorType((batch, C, 9, 10)))

    def weights(*shape: int) -> tuple[str, str]:
        return graph.add_constant("w", filters(*shape)), graph.add_constant("b", filters(shape[0]))

    ends: dict[str, Any] = {"bias": True, "activation": "clip:0:6"}
    for n in range(count):
        wide = graph.add(f"wide{n}", Conv(**ends), x, *weights(hidden, C, 1, 1))
        deep = Conv(groups=hidden, padding=((1, 1), (1, 1)), **ends)
        middle = graph.add(f"deep{n}", deep, wide, *weights(hidden, 1, 3, 3))
        x = graph.add(f"narrow{n}", Conv(bias=True, residual=True), middle, *weights(C, hidden, 1, 1), x)
    graph.outputs["y"] = x
    return graph


def names(graph: Graph) -> list[tuple[str, ...]]:
    return [tuple(node.name for node in chain.nodes) for chain in chains(graph)]


def network(graph: Graph, cut: dict[str, FusedBlocking], images: Any = None, **options: Any) -> CompiledNetwork:
    return compiled(graph, known=Choices(images=images or {}, fused=cut), **options)


def test_chains_are_as_long_as_they_can_be() -> None:
    assert names(blocks(2)) == [("wide0", "deep0", "narrow0"), ("wide1", "deep1", "narrow1")]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("output", [("wide0", "deep0")]),  # somebody else takes what is between
        ("second user", [("deep0", "narrow0")]),
        ("residual", [("wide0", "deep0")]),
        ("computed filters", [("wide0", "deep0")]),
    ],
)
def test_what_others_take_ends_a_chain(change: str, expected: list[tuple[str, ...]]) -> None:
    graph = blocks()
    if change == "output":
        graph.outputs["deep"] = "deep0"
    elif change == "second user":
        graph.outputs["z"] = graph.add("z", Elementwise(("relu", 0)), "wide0")
    elif change == "residual":
        w, b = graph.nodes["narrow0"].inputs[1:3]
        other = graph.add("other", Conv(), "x", graph.add_constant("w", filters(24, 8, 1, 1)))
        graph.nodes.pop("narrow0")
        sums = Conv(bias=True, residual=True)
        square = graph.add_constant("w", filters(24, 24, 1, 1)), graph.add_constant("b", filters(24))
        graph.outputs["y"] = graph.add("sum", sums, other, *square, "deep0")  # the depthwise array is what is added
        assert w
        assert b
    else:
        w = graph.add_input("given", TensorType((8, 24, 1, 1)))
        node = graph.nodes["narrow0"]
        graph.change("narrow0", node.operator, node.inputs[0], w, *node.inputs[2:])
    assert names(graph) == expected


def test_a_layer_between_two_depthwise_ones_goes_with_the_first() -> None:
    graph = Graph("separable")
    value = graph.add_input("x", TensorType((1, 8, 6, 6)))
    for n in range(2):
        deep = Conv(groups=8, padding=((1, 1), (1, 1)))
        value = graph.add(f"deep{n}", deep, value, graph.add_constant("w", filters(8, 1, 3, 3)))
        value = graph.add(f"flat{n}", Conv(), value, graph.add_constant("w", filters(8, 8, 1, 1)))
    graph.outputs["y"] = graph.add("pool", Pool(reduction="max", window=(2, 2), stride=(2, 2)), value)
    assert names(graph) == [("deep0", "flat0"), ("deep1", "flat1")]


def test_the_graph_means_the_same() -> None:
    graph = blocks(2)
    found = fused(graph, chains(graph))
    assert [type(node.operator) for node in found.nodes.values()] == [FusedConv, FusedConv]
    assert set(found.constants) == set(graph.constants)
    x = {"x": filters(2, 8, 9, 10)}
    assert np.array_equal(evaluate(found, x)["y"], evaluate(graph, x)["y"])


@kernels
def test_slopes_of_the_layers_stand_behind_their_biases() -> None:
    graph = blocks()
    for name in ("wide0", "deep0"):
        node = graph.nodes[name]
        x, w, b = node.inputs
        values = graph.add_constant("k", np.concatenate([graph.constants[b], filters(24)]))
        graph.change(name, replace(node.operator, activation="prelu"), x, w, values)
    net = network(graph, {"narrow0": CUT})
    assert list(net.fused) == ["narrow0"]
    agree(net, graph, 1e-5)


@kernels
def test_layers_may_share_filters_and_not_their_bias() -> None:
    graph = blocks(2)
    for name in ("wide", "deep", "narrow"):
        first, second = (graph.nodes[f"{name}{n}"] for n in range(2))
        other = graph.add_constant("b", 1.0 - graph.constants[first.inputs[2]])
        graph.change(second.name, second.operator, second.inputs[0], first.inputs[1], other, *second.inputs[3:])
    net = network(graph, {"narrow0": CUT, "narrow1": CUT})
    assert len(net.fused) == 2
    agree(net, graph, 1e-5)


@kernels
@pytest.mark.parametrize("images", [None, 1])
def test_answers_are_the_same(images: int | None) -> None:
    graph = blocks(2)
    parts = None if images is None else dict.fromkeys(graph.nodes, images)
    net = network(graph, {"narrow0": CUT, "narrow1": FusedBlocking(9, 24)}, parts)
    agree(net, graph, 1e-5)
    assert list(net.fused) == ["narrow0", "narrow1"]
    steps = net.profile(filters(2, 8, 9, 10), repeat=1)
    assert [(step.name, step.by, step.is_layer) for step in steps] == [
        ("narrow0", "fused[layers=3,rows=4,channels=8]", True),
        ("narrow1", "fused[layers=3,rows=9,channels=24]", True),
    ]
    assert "fused[layers=3,rows=4,channels=8]" in net.explain()
    assert net.foreign == []


@kernels
@pytest.mark.parametrize("images", [1, 3])
def test_fused_layers_read_and_store_parts_of_arrays(images: int) -> None:
    graph = Graph("a unit of ShuffleNet V2")
    x = graph.add_input("x", TensorType((images, 4, 9, 10)))
    a = graph.add("a", Conv(), x, graph.add_constant("w", filters(16, 4, 1, 1)))
    left, right = halves(graph, a)
    wide = graph.add("wide", Conv(), right, graph.add_constant("w", filters(24, 8, 1, 1)))
    deep = Conv(groups=24, padding=((1, 1), (1, 1)))
    middle = graph.add("deep", deep, wide, graph.add_constant("w", filters(24, 1, 3, 3)))
    narrow = graph.add("narrow", Conv(activation="relu"), middle, graph.add_constant("w", filters(8, 24, 1, 1)))
    joined = graph.add("joined", Concat(1), left, narrow)
    graph.outputs["y"] = graph.add("y", Conv(), joined, graph.add_constant("w", filters(5, 16, 1, 1)))
    net = network(graph, {"narrow": CUT})
    assert list(net.fused) == ["narrow"]
    views = net._running.schedule.views
    assert views.free == {"left", "right"}
    assert (views.root("narrow"), views.root("right")) == (("joined", 8 * 90 * 4), ("a", 8 * 90 * 4))
    agree(net, graph, 1e-5)


@kernels
def test_what_was_quicker_is_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One race for chains alike; what lost stays apart; no race without timing, and another for other kernels."""
    graph, device, options, raced = blocks(2, batch=8), CPU.current(), {"vendors": False}, []
    asked = NetworkOptions.of(options)
    made = planned(graph, Choices(), device, asked, "heuristic")

    def race(won: bool) -> None:
        def quickest(schedules: Any, cache: Any, part: bool) -> tuple[int, list[float]]:
            raced.append(len(schedules))
            return (len(schedules) - 1) * won, [1.0] * len(schedules)

        monkeypatch.setattr(choice, "quickest", quickest)

    race(True)
    assert with_fused(made, device, asked, "heuristic").fused == {}
    assert not raced
    found = with_fused(made, device, asked, "hybrid").fused
    assert list(found) == ["narrow0", "narrow1"]
    assert len(raced) == 1
    assert raced[0] > 1
    net = CompiledNetwork(graph, device, options)
    assert net.fused == found
    agree(net, graph, 1e-5)
    assert CompiledNetwork(graph, device, options | {"tolerance": 1.0}).fused == found
    assert CompiledNetwork(graph, device, options | {"tolerance": 1e-9}).fused == {}
    assert CompiledNetwork(graph, device, options | {"workspace_limit": 0}).fused == {}
    assert with_fused(made, device, asked, "hybrid").fused == found
    assert len(raced) == 1
    monkeypatch.setattr(choice, "code_of_networks", lambda device: "another")
    assert CompiledNetwork(graph, device, options).fused == {}
    race(False)
    assert with_fused(made, device, asked, "hybrid").fused == {}
    assert len(raced) == 2
    assert CompiledNetwork(graph, device, options).fused == {}


@kernels
def test_what_was_quicker_is_recalled_with_other_plans_until_it_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, device, options, raced = blocks(batch=2), CPU.current(), NetworkOptions.of({"vendors": False}), []

    def quickest(schedules: Any, cache: Any, part: bool) -> tuple[int, list[float]]:
        raced.append(len(schedules))
        return 1 - len(raced) // 2, [1.0] * len(schedules)

    monkeypatch.setattr(choice, "quickest", quickest)
    made = planned(graph, Choices(), device, options, "heuristic")
    other = planned(graph, Choices({"wide0": "numpy.gemm[tile=image]"}), device, options, "heuristic")
    found = with_fused(made, device, options, "hybrid").fused
    assert list(found) == ["narrow0"]
    assert with_fused(other, device, options, "heuristic").fused == found
    assert with_fused(other, device, options, "hybrid").fused == {}
    assert len(raced) == 2
    assert with_fused(other, device, options, "heuristic").fused == {}
    assert with_fused(made, device, options, "heuristic").fused == found


@kernels
@pytest.mark.parametrize("cut", [[0, 8], [10, 8], [4, 5], [4, 8.0], [4], "48", 4, [True, True], [1e999, 8]])
def test_a_record_by_which_nothing_can_be_cut_counts_for_nothing(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, device, options = blocks(batch=2), CPU.current(), NetworkOptions.of({"vendors": False})
    made = planned(graph, Choices(), device, options, "heuristic")
    monkeypatch.setattr(choice.Kept, "get", lambda self, what: {"blocking": cut})
    assert with_fused(made, device, options, "heuristic").fused == {}
    monkeypatch.setattr(choice.Kept, "get", lambda self, what: {"blocking": [4, 8]})
    assert set(with_fused(made, device, options, "heuristic").fused.values()) == {(4, 8)}


@kernels
def test_only_what_fits_the_limit_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, device, raced = blocks(batch=8), CPU.current(), []

    def quickest(schedules: Any, cache: Any, part: bool) -> tuple[int, list[float]]:
        raced.append(len(schedules))
        return 0, [1.0]

    monkeypatch.setattr(choice, "quickest", quickest)
    for limit in (None, 0):
        options = NetworkOptions.of({"vendors": False, "workspace_limit": limit})
        made = planned(graph, Choices(), device, NetworkOptions.of({"vendors": False}), "heuristic")
        with_fused(made, device, options, "hybrid")
    assert raced[0] > 1
    assert raced[1] == 1


def test_numpy_computes_each_layer_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.pool, "unavailable", lambda: "nothing compiles here")
    graph = blocks(1)
    made = planned(graph, Choices(), CPU.current(), NetworkOptions.of({"vendors": False}), "heuristic")
    for known in (None, {"narrow0": CUT}):
        assert with_fused(made, CPU.current(), NetworkOptions.of({}), "heuristic", known) is made


@kernels
def test_an_algorithm_that_is_named_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_chosen", lambda made, found, *rest: {chain.name: CUT for chain in found})
    net = network(blocks(1), {})
    assert net.tune("heuristic").fused == {"narrow0": CUT}
    assert net.tune("numpy.gemm").fused == {}


@kernels
def test_nothing_is_fused_that_needs_more_memory_than_there_may_be() -> None:
    graph = blocks(1, batch=1)
    apart, together = (network(graph, cut).arena_bytes for cut in ({}, {"narrow0": FusedBlocking(9, 24)}))
    assert together > apart  # each thread has a workspace of its own
    assert network(graph, {"narrow0": FusedBlocking(9, 24)}, memory_limit=apart).fused == {}
    assert network(graph, {"narrow0": FusedBlocking(9, 24)}, memory_limit=together).fused


@kernels
def test_saved_networks_keep_what_is_fused(tmp_path: Path) -> None:
    graph, path = blocks(2), tmp_path / "net.autoconv"
    net = network(graph, {"narrow1": CUT})
    net.save(path)
    again = autoconv.load(path)
    assert again.fused == {"narrow1": CUT}
    x = filters(2, 8, 9, 10)
    assert np.array_equal(again.run(x), net.run(x))
    assert autoconv.load(path, tolerance=1.0).fused == {"narrow1": CUT}
    for limit in ({"workspace_limit": 0}, {"tolerance": 0}):
        assert autoconv.load(path, **limit).fused == {}


@kernels
def test_what_is_fused_is_given_up_with_the_layouts_it_was_chosen_for(tmp_path: Path) -> None:
    """A memory limit puts all in NCHW, where other chains may begin and end."""
    graph, path = blocks(), tmp_path / "net.autoconv"
    in_nhwc = compiled(graph, known=Choices(in_nhwc=frozenset({"narrow0"}), fused={"deep0": CUT}))
    assert in_nhwc.fused == {"deep0": CUT}
    in_nhwc.save(path)
    assert autoconv.load(path).fused == {"deep0": CUT}
    again = autoconv.load(path, memory_limit=in_nhwc.arena_bytes // 2)
    assert again.in_nhwc == frozenset()
    agree(again, graph, 1e-5)


@kernels
@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"narrow1": [4, "8"]}, "expected numbers of rows and channels"),
        ({"narrow1": [4]}, "damaged"),
        ({"narrow1": [10, 8]}, "expected 1 to 9 rows and a part of 24 channels, got 10 and 8"),
        ({"narrow1": [4, 7]}, "a part of 24 channels, got 4 and 7"),
        ({"deep1": [4, 8]}, "fused node 'deep1': expected a layer that can be fused"),
    ],
)
def test_what_a_file_says_is_checked(found: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.autoconv"
    network(blocks(2), {"narrow1": CUT}).save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["network"].tobytes()) | {"fused": found}
    np.savez(tmp_path / "changed.npz", **arrays | {"network": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    with pytest.raises(ConfigError, match=message):
        autoconv.load(tmp_path / "changed.npz")
