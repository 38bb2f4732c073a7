"""Choosing for a whole network: what fits into its memory together, and is the best of that."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs import agree, compiled, filters, small
from planning import listed
from vectors import device_with

from autoconv import registry
from autoconv.common import code_hash
from autoconv.cpu import pool
from autoconv.cpu.device import CPU, host_instruction_set
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice import batch, choose, fused
from autoconv.networks.choice.candidate import best_in_network
from autoconv.networks.choice.choose import plans_for
from autoconv.networks.choice.code import code_of_networks
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Conv, TensorType
from autoconv.networks.passes import optimized
from autoconv.networks.passes.batch_split import split
from autoconv.networks.run.memory import ALIGNMENT, Views, arena_bytes
from autoconv.records.cache import TuningCache
from autoconv.records.kept import Kept
from autoconv.records.schema import Facts
from autoconv.tuning import planner

NUMPY = "numpy.gemm[tile=image]"
SIZES = (0, 1 << 12, 1 << 16, 1 << 20)  # of scratch memory that candidates take, the best the most
PACKED = 5000  # bytes of filters that are packed in every run


def chain(channels: list[int]) -> Graph:
    """Convolutions one after the other, with so many channels between them."""
    graph = Graph("chain")
    value = graph.add_input("x", TensorType((1, channels[0], 16, 16)))
    for n, (C, K) in enumerate(itertools.pairwise(channels)):
        value = graph.add(f"c{n}", Conv(), value, graph.add_constant(f"w{n}", filters(K, C, 1, 1)))
    graph.outputs["y"] = value
    return graph


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Plans are pretended; what limits they were asked for with."""
    limits: list[int | None] = []

    def plan(layer: Any, mode: str, *, workspace_limit: int | None = None, **options: Any) -> Any:
        limits.append(workspace_limit)
        packed = PACKED if options["weights"] == "varying" else 0
        ways = [(size, size + (size and packed)) for size in SIZES]
        size, both = max(way for way in ways if workspace_limit is None or way[1] <= workspace_limit)
        kernel = SimpleNamespace(workspace_bytes=size)
        alone = {"candidate": "direct", "ranking": [], "timings": {}, "layer": layer, "workspace_bytes": both}
        return SimpleNamespace(kernel=kernel, mode=mode, options=options, **alone)

    monkeypatch.setattr(choose, "plan", plan)
    return limits


def scratch(graph: Graph, **options: Any) -> dict[str, int]:
    asked = NetworkOptions.of(options)
    plans = plans_for(split(graph, {}), Views(graph), CPU.current(), asked, {}, "heuristic")
    return {name: made.kernel.workspace_bytes for name, made in plans.items()}


def total(graph: Graph, taken: dict[str, int]) -> int:
    return arena_bytes(Views(graph), [taken[name] for name in graph.nodes])


def test_without_a_limit_every_layer_takes_what_it_likes(asked: list[int | None]) -> None:
    assert set(scratch(chain([4, 8, 4])).values()) == {SIZES[-1]}
    assert asked == [None, None]
    assert set(scratch(chain([4, 8, 4]), workspace_limit=5000).values()) == {1 << 12}


def test_each_layer_takes_what_the_arrays_beside_it_leave(asked: list[int | None]) -> None:
    graph = chain([4, 64, 8, 4])  # 64 and 8 KiB between them
    limit = (1 << 20) + (10 << 10)
    taken = scratch(graph, memory_limit=limit)
    assert taken == {"c0": 1 << 16, "c1": 1 << 16, "c2": 1 << 20}
    assert total(graph, taken) <= limit
    assert len(asked) == 5  # the last was right at once


@pytest.mark.parametrize("extra", [0, 63, 64, 5000, 70000, 1 << 20])
def test_the_whole_is_never_over_the_limit(asked: list[int | None], extra: int) -> None:
    rng = np.random.default_rng(extra)
    for _ in range(20):
        graph = chain([int(n) for n in rng.integers(1, 200, 7)])
        least = total(graph, dict.fromkeys(graph.nodes, 0))
        assert total(graph, scratch(graph, memory_limit=least + extra)) <= least + extra


def test_filters_that_are_packed_in_every_run_take_room_too(asked: list[int | None]) -> None:
    graph = Graph("computed")
    x, w = graph.add_input("x", TensorType((1, 4, 16, 16))), graph.add_input("w", TensorType((8, 4, 1, 1)))
    graph.outputs["y"] = graph.add("y", Conv(), x, w)
    whole = (1 << 20) + PACKED
    for limit, taken in ((whole + ALIGNMENT, 1 << 20), (whole - 1, 1 << 16), (PACKED, 0)):
        assert scratch(graph, memory_limit=limit) == {"y": taken}


def test_a_smaller_limit_of_each_stays(asked: list[int | None]) -> None:
    graph = chain([4, 64, 4])
    taken = scratch(graph, memory_limit=(1 << 16) + (64 << 10), workspace_limit=100)
    assert set(taken.values()) == {0}


def test_a_limit_that_the_arrays_exceed_says_what_they_take(asked: list[int | None]) -> None:
    graph = chain([4, 64, 4])
    for limit in (65535, np.int64(65535)):
        with pytest.raises(PlanError, match="chain: memory_limit=65535: expected at least 65536 bytes, which the arr"):
            scratch(graph, memory_limit=limit)
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises(PlanError, match=f"memory_limit={wrong!r}: expected an integer of at least 0, or None"):
            scratch(graph, memory_limit=wrong)


def test_a_named_candidate_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: dict[str, Any] = {"ranking": [], "timings": {}, "layer": ConvLayer(N=1, C=4, H=16, W=16, K=64, R=1, S=1)}
    alone["workspace_bytes"] = 1 << 20
    made = SimpleNamespace(kernel=SimpleNamespace(workspace_bytes=1 << 20), candidate="gemm[BM=8]", **alone)
    monkeypatch.setattr(choose, "plan", lambda *arguments, **options: made)
    with pytest.raises(PlanError, match=r"node 'c0' by gemm\[BM=8\]: expected at most 4864 bytes .* got 1048576"):
        scratch(chain([4, 64, 4]), memory_limit=(64 << 10) + 5100)


@pytest.mark.parametrize("read", [True, False])
def test_numpy_is_for_what_nothing_else_computes(read: bool) -> None:
    """Its BLAS's threads spin on after it, beside the layers that follow."""
    layer = ConvLayer(N=1, C=8, H=1, W=1, K=64, R=1, S=1)

    def best(**timings: float) -> str:
        times = {NUMPY if name == "numpy" else name: seconds for name, seconds in timings.items()}
        facts = {name: Facts("", time=seconds, samples=9, error=1e-7) for name, seconds in times.items()}
        ranking = sorted(times, key=times.__getitem__)
        made: Any = SimpleNamespace(layer=layer, candidate=ranking[0], ranking=ranking, timings=times, facts=facts)
        return best_in_network(made, CPU.current(), read=read)

    assert best(numpy=1e-4, direct=2e-4, gemm=3e-4) == "direct"
    assert best(numpy=1e-4) == NUMPY
    assert best(numpy=2e-4, gemm=1e-4) == "gemm"
    for source, expected in (("heuristic", "gemm"), ("user", NUMPY)):  # where nothing was timed
        made: Any = SimpleNamespace(candidate=NUMPY, source=source, timings={}, ranking=[NUMPY, "gemm", "direct"])
        assert best_in_network(made, CPU.current(), read=read) == expected


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_what_goes_past_the_caches_costs_whoever_reads_it() -> None:
    device = device_with(host_instruction_set(), 2)
    machine, layer = device.machine, ConvLayer(N=1, C=8, H=56, W=56, K=64, R=1, S=1)
    size = 4 * 64 * 56 * 56
    fetched = machine.reading(size, machine.beyond) - machine.reading(size, size / 2)
    assert fetched > 0
    past, kept, slow = (f"gemm[TK=4,NV=3,BC={BC},nt={nt}]" for BC, nt in ((8, 1), (8, 0), (4, 0)))

    def best(difference: float) -> str:
        timings = {past: 1e-3, kept: 1e-3 + difference, slow: 5e-3}
        facts = {name: Facts("", time=seconds, samples=9, error=1e-7) for name, seconds in timings.items()}
        made: Any = SimpleNamespace(layer=layer, candidate=past, ranking=list(timings), timings=timings, facts=facts)
        return best_in_network(made, device)

    assert best(0.5 * fetched) == kept
    assert best(1.5 * fetched) == past
    unknown: Any = SimpleNamespace(layer=layer, candidate=past, ranking=[past, kept], timings={})
    assert best_in_network(unknown, device) == past


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
def test_what_other_threads_wrote_costs_a_candidate_that_does_not_go_by_pixels() -> None:
    device = device_with(host_instruction_set(), 2)
    machine, layer = device.machine, ConvLayer(N=1, C=480, H=14, W=14, K=80, R=1, S=1, layout="NHWC")
    passed = 4 * 14 * 14 * (480 + 80 / 2)  # all of the input that the other wrote, twice, and of the output
    waited = machine.reading(passed, machine.caches[2] / 4) - machine.reading(passed, machine.caches[1] / 2)
    assert waited > 0
    lanes = 64 // 4 if device.instruction_set == "avx512" else 8
    by_filters, by_pixels = (f"direct[TK={lanes},TP=1,TQ={TQ},BC=480,filters=packed]" for TQ in (28, 14))

    def best(layer: ConvLayer, difference: float, read: bool = True) -> str:
        timings = {by_filters: 1e-3, by_pixels: 1e-3 + difference}
        facts = {name: Facts("", time=seconds, samples=9, error=1e-7) for name, seconds in timings.items()}
        made: Any = SimpleNamespace(
            layer=layer, candidate=by_filters, ranking=list(timings), timings=timings, facts=facts
        )
        return best_in_network(made, device, read=read)

    assert best(layer, 0.5 * waited) == by_pixels
    assert best(layer, 1.5 * waited) == by_filters
    assert best(layer, 0.5 * waited, read=False) == by_filters
    for other in (layer.replace(layout="NCHW"), layer.replace(N=2), layer.replace(C=4800, K=8000)):
        assert best(other, 0.5 * waited) == by_filters


def test_a_network_under_a_limit_answers_the_same() -> None:
    graph = small(1)
    free = compiled(graph).arena_bytes
    whole = optimized(graph)
    least = arena_bytes(Views(whole))
    for limit in (least, (least + free) // 2, free):
        net = CompiledNetwork(graph, CPU.current(), {"vendors": False, "memory_limit": limit})
        assert net.arena_bytes <= limit
        agree(net, graph, 1e-5)


def test_facts_of_another_compiler_do_not_count_and_stay(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path, system=None)

    def kept(llvmlite: str) -> Kept:
        device: Any = SimpleNamespace(key="cpu", versions={"llvmlite": llvmlite})
        return Kept(cache, device, "operator", "code")

    older, newer = kept("0.49.0"), kept("0.50.0")
    older.keep("relu", seconds=2.0)
    assert newer.get("relu") == {}
    newer.keep("relu", seconds=1.0)
    assert [each.get("relu") for each in (older, newer)] == [{"seconds": 2.0}, {"seconds": 1.0}]
    cache.close()


@pytest.mark.parametrize("changed", ["direct", "autoconv.cpu.operators.elementwise", "autoconv.cpu.fused.kernels"])
def test_what_won_in_a_network_counts_until_any_kernel_changes(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, version = CPU.current(), code_hash.version
    before = code_of_networks(device)
    assert code_of_networks(device) == before
    if changed == "direct":
        monkeypatch.setattr(type(registry.by_name(device)[changed]), "version", "another")
    else:
        monkeypatch.setattr(code_hash, "version", lambda module: "another" if module == changed else version(module))
    assert code_of_networks(device) != before
    assert fused.code_of_networks is batch.code_of_networks is code_of_networks  # type: ignore[attr-defined]


def test_a_network_that_was_never_tuned_is_estimated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TuningCache(tmp_path)

    def loaded() -> CompiledNetwork:
        planner.forget_plans()  # as another process
        return CompiledNetwork(small(1), CPU.current(), {"vendors": False, "cache": cache})

    first, sets = loaded(), listed(monkeypatch)
    second = loaded()
    assert not sets
    assert {n: p.candidate for n, p in second.plans.items()} == {n: p.candidate for n, p in first.plans.items()}
    agree(second, small(1), 1e-4)
