"""A batch in parts: the same answers, less memory, and which parts are chosen."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from graphs import agree, compiled, drawn, filters, graph_of, small

import autoconv
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.errors import ConfigError, PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice import batch, choose
from autoconv.networks.choice.batch import remember, ways_to_split
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.times import OperatorTimes
from autoconv.networks.compiled import network as compiled_network
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Concat,
    Conv,
    Elementwise,
    Normalization,
    Operator,
    Pad,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    TensorType,
    Transpose,
)
from autoconv.networks.passes import optimized
from autoconv.networks.passes.batch_split import at_a_time, divisors, for_images, split
from autoconv.networks.reference import evaluate
from autoconv.networks.run import contest
from autoconv.networks.run.planned import Choices
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
ONES = (1, 1, 1, 1)


def in_parts(graph: Graph, images: dict[str, int], in_nhwc: Any = (), **options: Any) -> CompiledNetwork:
    return compiled(graph, known=Choices(in_nhwc=frozenset(in_nhwc), images=images), **options)


def chain(images: int, count: int = 3) -> Graph:
    """Convolutions one after the other."""
    graph = Graph("chain")
    value = graph.add_input("x", TensorType((images, 8, 16, 16)))
    for n in range(count):
        value = graph.add(f"c{n}", Conv(), value, graph.add_constant(f"w{n}", filters(8, 8, 1, 1)))
    graph.outputs["y"] = value
    return graph


@pytest.mark.parametrize(
    ("operator", "shapes", "apart"),
    [
        (Elementwise(("add", 0, 1)), [(4, 3), (4, 3)], True),
        (Elementwise(("add", 0, 1)), [(4, 4), (4,)], False),  # each image takes an element of all
        (Elementwise(("relu", 0)), [(4,)], True),
        (Reshape((4, 6)), [(4, 2, 3)], True),
        (Reshape((8, 3)), [(4, 2, 3)], False),
        (Transpose((0, 2, 1)), [(4, 2, 3)], True),
        (Transpose((1, 0, 2)), [(4, 4, 3)], False),
        (Slice((0, 1), (4, 2), (1, 1)), [(4, 3)], True),
        (Slice((3, 0), (4, 3), (-1, 1)), [(4, 3)], False),
        (Slice((1, 0), (2, 3), (1, 1)), [(4, 3)], False),
        (Concat(1), [(4, 3), (4, 2)], True),
        (Concat(0), [(4, 3), (4, 3)], False),
        (Pad((0, 1), (0, 0)), [(4, 3)], True),
        (Pad((1, 0), (0, 0)), [(4, 3)], False),
        (Reduce("mean", (1,)), [(4, 3)], True),
        (Reduce("mean", (0, 1)), [(4, 3)], False),
        (Softmax(1), [(4, 3)], True),
        (Softmax(0), [(4, 3)], False),
        (Normalization(axis=1, epsilon=1e-5), [(4, 3)], True),
        (Normalization(axis=0, epsilon=1e-5), [(4, 3)], False),
        (Conv(), [(4, 3, 5, 5), (4, 3, 1, 1)], False),  # filters that are computed
    ],
)
def test_what_mixes_images_stays_whole(operator: Operator, shapes: list[tuple[int, ...]], apart: bool) -> None:
    graph = graph_of(operator, *shapes)
    assert bool(for_images(graph, 2).nodes) == apart
    if apart:
        whole, parts = drawn(graph), split(graph, {"y": 2}).graph
        np.testing.assert_array_equal(evaluate(parts, whole)["y"], evaluate(graph, whole)["y"])
    else:
        with pytest.raises(ConfigError, match="test: node 'y': cannot be computed for 2 of 4 images"):
            split(graph, {"y": 2})


@pytest.mark.parametrize("count", [0, 3, 4, 5, -1])
def test_parts_divide_the_batch(count: int) -> None:
    with pytest.raises(ConfigError, match=f"chain: node 'c0': cannot be computed for {count} of 4 images"):
        split(chain(4), {"c0": count})


def test_a_constant_of_every_image_keeps_a_node_whole() -> None:
    graph = Graph("test")
    x = graph.add_input("x", TensorType((4, 3)))
    graph.outputs["y"] = graph.add("y", Elementwise(("add", 0, 1)), x, graph.add_constant("c", filters(4, 3)))
    assert [bool(for_images(graph, count).nodes) for count in (1, 2, 4)] == [False, False, True]


@kernels
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("which", ["all", "first", "second", "every other"])
def test_parts_agree_with_float64(count: int, which: str) -> None:
    graph = small(4)
    names = list(at_a_time(optimized(graph), count))
    assert len(names) > 8
    chosen = {"all": names, "first": names[:5], "second": names[4:], "every other": names[::2]}[which]
    net = in_parts(graph, dict.fromkeys(chosen, count))
    assert net.images == dict.fromkeys(chosen, count)
    agree(net, graph, 1e-5)
    assert net.arena_bytes < compiled(graph).arena_bytes or which != "all"


@kernels
def test_parts_in_nhwc_give_what_networks_of_so_many_images_give() -> None:
    graph, in_nhwc = chain(4), ["c0", "c1"]
    images = {"c0": 2, "c1": 2}
    net, of_two = in_parts(graph, images, in_nhwc), in_parts(chain(2), {}, in_nhwc)
    x = drawn(graph)["x"]
    np.testing.assert_array_equal(net.run(x), np.concatenate([of_two.run(x[:2]), of_two.run(x[2:])]))
    assert net.in_nhwc == {"c0", "c1"}


@kernels
def test_arrays_between_parts_are_those_of_some_images() -> None:
    whole, parts = in_parts(chain(8), {}), in_parts(chain(8), dict.fromkeys(["c0", "c1", "c2"], 1))
    image = 8 * 16 * 16 * 4
    assert whole.arena_bytes >= 16 * image
    assert parts.arena_bytes <= 2 * image + max(made.kernel.workspace_bytes for made in parts.plans.values())
    filters = (max(made.kernel.packed_bytes, 4 * 8 * 8) for made in parts.plans.values())
    assert parts.weight_bytes <= sum(filters)  # all parts read the same ones
    assert "in 1 call\n" in parts.explain()


@kernels
def test_a_node_is_listed_once(tmp_path: Path) -> None:
    net = in_parts(chain(4), {"c1": 2})
    assert [line.split()[:4] for line in net.explain().splitlines()[2:]][1] == ["c1", "Conv", "in", "2"]
    steps = net.profile(*drawn(net.graph).values(), repeat=2)
    assert [(step.name, step.operator) for step in steps] == [("c0", "Conv"), ("c1", "Conv in 2 parts"), ("c2", "Conv")]
    assert all(step.is_layer and step.seconds > 0 for step in steps)
    net.save(tmp_path / "net.autoconv")
    again = autoconv.load(tmp_path / "net.autoconv")
    assert again.images == {"c1": 2}
    x = drawn(net.graph)["x"]
    np.testing.assert_array_equal(again.run(x), net.run(x))


@kernels
def test_a_memory_limit_takes_fewer_images_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, image = chain(8, 4), 8 * 16 * 16 * 4
    for limit in (4 * image, 8 * image):
        net = in_parts(graph, {}, memory_limit=limit)
        assert net.arena_bytes <= limit
        agree(net, graph, 1e-5)
    assert {*net.images.values()} <= {1, 2, 4}
    made = mock.Mock(wraps=choose.plans_for)
    monkeypatch.setattr(choose, "plans_for", made)
    in_parts(graph, {}, memory_limit=4 * image)
    assert all(call.args[0].images for call in made.call_args_list), "arrays of the whole batch alone do not fit"
    with pytest.raises(PlanError, match="memory_limit=1000: expected at least"):
        in_parts(graph, {}, memory_limit=1000)


SECONDS = {1: 1.0, 2: 1.5, 4: 2.0, 8: 9.0}  # of a layer, by how many images it is for


def test_divisors_of_any_batch_are_found_at_once() -> None:
    assert all(divisors(batch) == [n for n in range(1, batch + 1) if batch % n == 0] for batch in range(1, 200))
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
    assert len(divisors(2**30)) == 31


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[ConvLayer]:
    """Pretended times: those of the whole batch are on record, those of parts once they have been timed."""
    known: list[ConvLayer] = []

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Any:
        if mode == "cached" and layer.N < 8 and layer not in known:
            raise PlanError("nothing on record")
        if layer not in known:
            known.append(layer)
        seconds = SECONDS[layer.N]
        facts = {"direct": Facts("", time=seconds, samples=9)}
        return SimpleNamespace(
            candidate="direct", ranking=["direct"], timings={"direct": seconds}, facts=facts, layer=layer
        )

    monkeypatch.setattr(batch, "plan", plan)
    monkeypatch.setattr(batch, "least_estimate", lambda layer, device: layer.N**2)  # fewer images seem quicker
    monkeypatch.setattr(OperatorTimes, "seconds", lambda self, operator, inputs: 0.0)
    return known


def test_the_quickest_parts_are_chosen_from_what_is_timed(
    timed: list[ConvLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = NetworkOptions.of({"cache": TuningCache(tmp_path)})
    device = CPU.current()
    assert ways_to_split(chain(8), (), device, options, "heuristic") == [{}]
    assert ways_to_split(chain(8), (), device, options, "profile") == [{}]
    assert not timed  # its arrays fit into the caches
    monkeypatch.setattr(batch, "arena_bytes", lambda views: 1 << 40)
    names = ["c0", "c1", "c2"]
    ways = ways_to_split(chain(8), (), device, options, "profile")
    assert ways == [{}, dict.fromkeys(names, 4), dict.fromkeys(names, 1)]  # 2 times 2 seconds is the least
    assert ways_to_split(chain(1), (), device, options, "profile") == [{}]
    monkeypatch.setitem(SECONDS, 8, 3.0)
    assert ways_to_split(chain(8), (), device, options, "profile") == [{}, dict.fromkeys(names, 1)]


def test_where_a_layer_has_no_time_nothing_is_chosen_from_times(
    timed: list[ConvLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(layer: ConvLayer, mode: str, **options: Any) -> Any:
        raise PlanError("every candidate crashed")

    monkeypatch.setattr(batch, "plan", fails)
    monkeypatch.setattr(batch, "arena_bytes", lambda views: 1 << 40)
    options = NetworkOptions.of({"cache": TuningCache(tmp_path)})
    ways = ways_to_split(chain(8), (), CPU.current(), options, "profile")
    assert ways == [{}, dict.fromkeys(["c0", "c1", "c2"], 1)]


def test_what_won_is_known_until_kernels_change(
    timed: list[ConvLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, device, cache = chain(8), CPU.current(), TuningCache(tmp_path)
    options = NetworkOptions.of({"cache": cache})
    remember(graph, {"c1": 2}, [2.0, 1.0], device, options)
    for mode in ("heuristic", "profile"):
        assert ways_to_split(graph, (), device, options, mode) == [{"c1": 2}]
    for other, limits in ((chain(4), {}), (graph, {"exact": True}), (graph, {"memory_limit": 1 << 20})):
        asked = NetworkOptions.of({"cache": cache, **limits})
        assert ways_to_split(other, (), device, asked, "heuristic") == [{}]
    monkeypatch.setattr(batch, "code_of_networks", lambda device: "another")
    assert ways_to_split(graph, (), device, options, "heuristic") == [{}]
    remember(graph, {"gone": 2}, [2.0, 1.0], device, options)
    assert ways_to_split(graph, (), device, options, "heuristic") == [{}]


@pytest.mark.parametrize("images", [{"c1": 1e999}, {"c1": 2.0}, {"c1": "2"}, {"c1": True}, {"c1": 3}, [2], None])
def test_parts_that_cannot_be_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: object) -> None:
    options = NetworkOptions.of({"cache": TuningCache(tmp_path)})
    monkeypatch.setattr(batch.Kept, "get", lambda self, what: {"images": images})
    assert ways_to_split(chain(8), (), CPU.current(), options, "heuristic") == [{}]


@pytest.mark.parametrize(
    ("seconds", "winner", "rounds"),
    [
        ([[3.0], [2.0], [1.0]], 2, contest.FEWEST),
        ([[3.0], [2.0], [4.0]], 1, contest.FEWEST),
        ([[3.0], [3.0], [4.0]], 0, contest.FEWEST),
        ([[3.0], [2.0, 4.0], [4.0]], 0, contest.MOST),  # as often slower
        ([[1.0, 9.0], [0.9, 8.0], [5.0]], 1, contest.FEWEST),  # what disturbs meets both
        ([[3.0], [2.0], [2.01]], 2, contest.FEWEST),  # needs less memory
    ],
)
def test_the_whole_batch_stays_unless_parts_are_likely_quicker(
    seconds: list[list[float]], winner: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, runs = [0.0], [0, 0, 0]

    class Runs:
        """In the place of an instance: takes these seconds in turn, and one that is not counted at first."""

        def __init__(self, schedule: Any) -> None:
            self.which = schedule.which

        def run(self, inputs: Any) -> dict[str, Any]:
            mine = seconds[self.which]
            clock[0] += mine[(runs[self.which] - 1) % len(mine)] / 1000
            runs[self.which] += 1
            return {"y": np.ones(3)}

    monkeypatch.setattr(contest, "Instance", Runs)
    monkeypatch.setattr(contest.time, "perf_counter", lambda: clock[0])
    schedules: Any = [
        SimpleNamespace(graph=chain(4), device=CPU.current(), which=n, arena_bytes=9 - n) for n in range(3)
    ]
    best, medians = contest.quickest(schedules, TuningCache(tmp_path))
    assert (best, len(medians)) == (winner, 3)
    assert runs == [rounds + 1] * 3


def test_ways_to_compute_a_part_run_more_often_and_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first run of two is slow, and does not count."""
    clock, runs = [0.0], [0, 0]

    class Runs:
        def __init__(self, schedule: Any) -> None:
            self.which = schedule.which

        def run(self, inputs: Any) -> dict[str, Any]:
            warm = runs[self.which] % 2 == 0  # the very first is of no round
            clock[0] += (3.0, 2.0)[self.which] * (1 if warm else (1, 9)[self.which])
            runs[self.which] += 1
            return {"y": np.ones(3)}

    monkeypatch.setattr(contest, "Instance", Runs)
    monkeypatch.setattr(contest.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(contest, "SECONDS", 1e9)
    schedules: Any = [SimpleNamespace(graph=chain(4), device=CPU.current(), which=n, arena_bytes=1) for n in range(2)]
    assert contest.quickest(schedules, TuningCache(tmp_path), part=True) == (1, [3.0, 2.0])
    assert runs == [1 + 2 * contest.FEWEST_OF_PARTS] * 2


def test_a_way_that_answers_otherwise_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick it is; what is NaN in both is the same answer."""

    class Runs:
        def __init__(self, schedule: Any) -> None:
            self.which = schedule.which

        def run(self, inputs: Any) -> dict[str, Any]:
            return {"y": np.array([np.nan, 1.0, 2.0 + (0.0, 0.1, 1e-4)[self.which]])}

    monkeypatch.setattr(contest, "Instance", Runs)
    schedules: Any = [SimpleNamespace(graph=chain(4), device=CPU.current(), which=n, arena_bytes=1) for n in range(3)]
    with pytest.warns(UserWarning, match="y: way 1 to compute it gave another answer"):
        best, medians = contest.quickest(schedules, TuningCache(tmp_path))
    assert best in (0, 2)
    assert [median == math.inf for median in medians] == [False, True, False]


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float16, np.float32, np.complex64])
def test_answers_of_any_type_are_compared(dtype: type) -> None:
    answer = np.array([0, 1, 1], dtype)
    assert contest._close(answer, answer.copy())
    assert not contest._close(answer, np.array([1, 1, 1], dtype))
    if dtype is np.complex64:
        ways = [np.array([1 + y, np.inf, np.nan], dtype) for y in (1j, 1.001j, -1j)]
        assert [contest._close(ways[0], other) for other in ways] == [True, True, False]


@kernels
def test_kernels_of_ours_are_not_run_to_see_whether_they_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that pack filters in every run, which is no part of the single call."""
    graph = graph_of(Conv(), (4, 8, 6, 6), (8, 8, 1, 1))
    schedule = compiled(graph, known=Choices({"y": "gemm"}))._running.schedule
    assert [step.function is None for step in schedule.steps] == [False]
    monkeypatch.setattr(contest, "Instance", None)
    assert contest.repeatable(schedule)


@kernels
def test_what_wins_a_race_runs_and_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cache = chain(4), TuningCache(tmp_path)
    net = CompiledNetwork(graph, CPU.current(), {"vendors": False, "cache": cache})
    assert net.images == {}
    monkeypatch.setattr(compiled_network, "ways_to_split", lambda *arguments: [{}, {"c1": 2}, {"c0": 1}])
    monkeypatch.setattr(compiled_network, "quickest", lambda schedules, cache: (1, [3.0, 1.0, 2.0]))
    assert net.tune("direct").images == {"c1": 2}
    agree(net, graph, 1e-5)
    monkeypatch.undo()
    again = CompiledNetwork(graph, CPU.current(), {"vendors": False, "cache": cache})
    assert again.images == {"c1": 2}
    assert again.tune("direct").images == {"c1": 2}


@kernels
def test_parts_that_keep_no_limit_of_error_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a memory limit asks for are run, at the prices that are found for them."""
    graph, options = chain(4), {"vendors": False, "cache": TuningCache(tmp_path)}
    asked: list[dict[str, int]] = []

    def priced(*arguments: Any) -> None:
        if arguments[-1]:
            asked.append(arguments[-1])

    monkeypatch.setattr(compiled_network, "ways_to_split", lambda *arguments: [{"c1": 2}])
    monkeypatch.setattr(compiled_network, "priced_in_parts", priced)
    assert CompiledNetwork(graph, CPU.current(), options).images == {}
    assert asked == [{"c1": 2}]
    limited = CompiledNetwork(graph, CPU.current(), options | {"memory_limit": 3 * 8 * 16 * 16 * 4})
    assert limited.images
    assert asked == [{"c1": 2}, {"c1": 2}, limited.images]


def test_a_batch_of_nothing_has_no_parts() -> None:
    graph = Graph("empty")
    constant = graph.add_constant("k", filters(1 << 14, 1024))
    joined = graph.add("c", Concat(0), graph.add_input("x", TensorType((0, 1024))), constant)
    graph.outputs["y"] = graph.add("y", Reduce("mean", (1,)), graph.add("r", Elementwise(("relu", 0)), joined))
    assert ways_to_split(graph, frozenset(), CPU.current(), NetworkOptions.of({}), "profile") == [{}]
