"""Where the arrays of a network lie: within each other, over what nobody needs, and in an arena."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from graphs import agree, compiled, filters, small
from hypothesis import given
from hypothesis import strategies as st

from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Concat,
    Conv,
    Elementwise,
    Pool,
    Reduce,
    TensorType,
)
from autoconv.networks.run.compiled import CompiledNetwork
from autoconv.networks.run.memory import ALIGNMENT, Block, Views, arranged, rounded

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@kernels
def test_arrays_lie_within_each_other() -> None:
    graph = small(1)
    net = compiled(graph)
    views = Views(net.graph)
    assert {"half", "rows", "again"} <= views.free
    assert "joined" not in views.free  # one part of it is there twice
    assert views.root("joined") == ("again", 0)
    assert views.root("half") == ("again", 10 * 30 * 4)
    assert "again" not in [step.node.name for step in net._schedule.steps]
    in_batch = Views(compiled(small(2)).graph)
    assert not {"half", "again"} & in_batch.free  # parts of an image are no parts of a batch


@kernels
def test_an_expression_overwrites_what_nobody_needs() -> None:
    graph = small(1)
    views = Views(compiled(graph).graph)
    assert views.root("c.tanh") == views.root("c.silu") == ("again", 0)
    assert views.root("e")[0] != "d"


@kernels
@pytest.mark.parametrize("needed", ["before", "afterwards", "as an output"])
def test_an_expression_overwrites_what_was_needed_before_alone(needed: str) -> None:
    graph = Graph("squeeze and excitation")
    x = graph.add_input("x", TensorType((2, 4, 6, 6)))
    a = graph.add("a", Elementwise(("tanh", 0)), x)
    mean = graph.add("mean", Reduce("mean", (2, 3)), a)
    graph.outputs["y"] = graph.add("y", Elementwise(("mul", 0, ("sigmoid", 1))), a, mean)
    if needed == "afterwards":
        graph.outputs["z"] = graph.add("z", Elementwise(("neg", 0)), a)
    elif needed == "as an output":
        graph.outputs["z"] = a
    assert (Views(graph).root("y") == ("a", 0)) == (needed == "before")
    agree(compiled(graph), graph, 1e-6)


def least_bytes(blocks: Sequence[Block]) -> int:
    """Bytes that are needed at once at most: no arena is smaller."""
    steps = range(max((block.last for block in blocks), default=-1) + 1)
    return max((sum(rounded(b.nbytes) for b in blocks if b.first <= n <= b.last) for n in steps), default=0)


@kernels
@pytest.mark.parametrize("reader", ["an output", "a later node", "an earlier node", "nobody"])
def test_a_concatenation_whose_parts_are_needed_is_not_overwritten(reader: str) -> None:
    graph = Graph("test")
    x = graph.add_input("x", TensorType((1, 4, 6, 6)))
    a = graph.add("a", Pool(reduction="max", window=(2, 2)), x)
    b = graph.add("b", Pool(reduction="mean", window=(2, 2)), x)
    if reader == "an earlier node":
        graph.outputs["z"] = graph.add("z", Elementwise(("neg", 0)), a)
    c = graph.add("c", Concat(1), a, b)
    graph.outputs["y"] = graph.add("y", Elementwise(("sigmoid", 0)), c)
    if reader == "an output":
        graph.outputs["z"] = a
    elif reader == "a later node":
        graph.outputs["z"] = graph.add("z", Concat(1), "y", graph.add("n", Elementwise(("neg", 0)), a))
    assert (Views(graph).root("y")[0] == "c") == (reader == "nobody")
    agree(compiled(graph), graph, 1e-6)


@kernels
def test_no_name_of_an_array_is_that_of_scratch_memory() -> None:
    graph = Graph("names")
    value = graph.add_input("x", TensorType((1, 8, 16, 16)))
    names = ["0", "scratch", "scratch memory of 0", "1", "2"]
    for name in names:
        w = graph.add_constant("w", filters(8, 8, 3, 3))
        value = graph.add(name, Conv(padding=((1, 1), (1, 1))), value, w)
    graph.outputs["y"] = graph.add("y", Elementwise(("neg", 0)), value)
    net = CompiledNetwork(graph, CPU.current(), {"vendors": False}, dict.fromkeys(names, "winograd"))
    blocks = net._schedule.blocks
    needed = [max(call.workspace_bytes for call in step.calls) for step in net._schedule.steps]
    assert min(needed[: len(names)]) > 0
    assert [blocks[n].nbytes for n, nbytes in enumerate(needed) if nbytes] == needed[: len(names)]
    assert all(blocks[name].nbytes == graph.types[name].nbytes for name in names[:-1])
    agree(net, graph, 1e-4)


def test_no_more_memory_than_is_needed_at_once() -> None:
    net = compiled(small(1))
    schedule = net._schedule
    blocks = schedule.blocks
    assert schedule.arena_bytes < sum(block.nbytes for block in blocks.values())
    assert net.arena_bytes == schedule.arena_bytes <= 1.15 * least_bytes(list(blocks.values()))


@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(0, 12), st.integers(0, 5)).map(
            lambda t: Block(t[0], t[1], t[1] + t[2])
        ),
        max_size=25,
    )
)
def test_blocks_that_are_needed_together_do_not_meet(found: list[Block]) -> None:
    blocks = {str(n): block for n, block in enumerate(found)}
    offsets, total = arranged(blocks)
    assert least_bytes(found) <= total <= sum(rounded(block.nbytes) for block in found)
    for (name, a), (other, b) in itertools.combinations(blocks.items(), 2):
        if a.first <= b.last and b.first <= a.last:
            low, high = sorted([(offsets[name], a.nbytes), (offsets[other], b.nbytes)])
            assert low[0] + low[1] <= high[0]
    assert all(place % ALIGNMENT == 0 and place + blocks[n].nbytes <= total for n, place in offsets.items())
