"""Where the arrays of a network lie: within each other, over what nobody needs, and in an arena."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from graphs import agree, compiled, filters, halves, small
from hypothesis import given, settings
from hypothesis import strategies as st

from autoconv.cpu import pool
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Concat,
    Conv,
    ConvTranspose,
    Elementwise,
    Pool,
    Reduce,
    Resize,
    Slice,
    TensorType,
)
from autoconv.networks.run.memory import ALIGNMENT, Block, Views, arranged, rounded
from autoconv.networks.run.planned import Choices

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
    assert "again" not in [step.node.name for step in net._running.schedule.steps]
    batch = compiled(small(2)).graph
    in_batch = Views(batch)
    assert "half" not in in_batch.free  # who reads it takes images without a gap
    assert "again" in in_batch.free
    assert in_batch.pitch("joined") == in_batch.pitch("d") == batch.types["again"].nbytes // 2
    assert in_batch.pitch("again") is in_batch.pitch("half") is None
    assert "again" not in Views(batch, pitched=False).free


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


@kernels
@pytest.mark.parametrize("images", [1, 3])
def test_a_split_whose_parts_are_read_and_joined_again_copies_nothing(images: int) -> None:
    graph = Graph("split")
    x = graph.add_input("x", TensorType((images, 4, 6, 6)))
    a = graph.add("a", Conv(), x, graph.add_constant("wa", filters(8, 4, 1, 1)))
    left, right = halves(graph, a)
    b = graph.add("b", Conv(padding=((1, 1), (1, 1))), right, graph.add_constant("wb", filters(5, 4, 3, 3)))
    c = graph.add("c", Pool(reduction="max", window=(3, 3), padding=((1, 1), (1, 1))), b)
    graph.outputs["y"] = graph.add("y", Elementwise(("tanh", 0)), graph.add("joined", Concat(1), left, right, b, c))
    views = Views(graph)
    assert views.free == {"left", "right", "joined"}
    assert [views.root(name) for name in ("a", "right", "b", "c", "y")] == [
        ("joined", n * 36 * 4) for n in (0, 4, 8, 13, 0)
    ]
    agree(compiled(graph), graph, 1e-5)
    alone = Views(graph, pitched=False)
    assert alone.free == (views.free if images == 1 else set())
    assert {alone.pitch(name) for name in graph.types} == {None}


@st.composite
def gathering(draw: st.DrawFn) -> Graph:
    """A graph of a few images, full of concatenations and slices."""
    graph, images = Graph("gathering"), draw(st.integers(2, 3))
    arrays = [graph.add_input("x", TensorType((images, 3, 6, 6)))]
    for n in range(draw(st.integers(3, 12))):
        kinds = ["concat", "concat", "slice", "split", "conv", "conv", "residual", "pool", "act", "sum", "up", "resize"]
        kind = draw(st.sampled_from(kinds))
        name = f"n{n}"
        value = draw(st.sampled_from(arrays[-4:]))
        C = graph.types[value].shape[1]
        alike = [a for a in arrays if graph.types[a] == graph.types[value]]
        if kind == "concat":
            some = draw(st.lists(st.sampled_from(arrays[-4:]), min_size=1, max_size=3))
            value = graph.add(name, Concat(1), value, *some)
        elif kind == "resize":
            half = graph.add(f"{name}.half", Slice((0, 0, 0, 0), (images, C, 3, 6), (1, 1, 2, 1)), value)
            places = tuple((n // 2, n // 2) for n in range(6))
            value = graph.add(name, Resize(2, places, ((0.25, 0.5),) * 6), half)
            mirrored = tuple((5 - n,) for n in range(6))
            value = graph.add(f"{name}.rows", Resize(3, mirrored, ((1.5,),) * 6), value)
        elif kind == "split":
            cut = draw(st.integers(0, C))
            for part, start, count in (("left", 0, cut), ("right", cut, C - cut)):
                if count:
                    counts = images, count, 6, 6
                    value_of_part = graph.add(f"{name}.{part}", Slice((0, start, 0, 0), counts, (1, 1, 1, 1)), value)
                    arrays.append(value_of_part)
            value = arrays[-1]
        elif kind == "slice":
            start = draw(st.integers(0, C - 1))
            counts = images, draw(st.integers(1, C - start)), 6, 6
            value = graph.add(name, Slice((0, start, 0, 0), counts, (1, 1, 1, 1)), value)
        elif kind in ("conv", "residual"):
            K = C if kind == "residual" else draw(st.integers(1, 5))
            w = graph.add_constant("w", filters(K, C, 3, 3))
            value = graph.add(name, Conv(padding=((1, 1), (1, 1))), value, w)
            if kind == "residual":
                value = graph.add(f"{name}.sum", Elementwise(("add", 0, 1)), value, draw(st.sampled_from(alike)))
        elif kind == "pool":
            reduction: Any = draw(st.sampled_from(["max", "mean"]))
            value = graph.add(name, Pool(reduction=reduction, window=(3, 3), padding=((1, 1), (1, 1))), value)
        elif kind == "up":
            half = graph.add(f"{name}.half", Pool(reduction="max", window=(2, 2), stride=(2, 2)), value)
            w = graph.add_constant("w", filters(C, 2, 2, 2))
            value = graph.add(name, ConvTranspose(stride=(2, 2)), half, w)
        elif kind == "act":
            value = graph.add(name, Elementwise(("tanh", 0)), value)
        else:
            value = graph.add(name, Elementwise(("max", 0, 1)), value, draw(st.sampled_from(alike)))
        arrays.append(value)
    graph.outputs["y"] = arrays[-1]
    if draw(st.booleans()):
        graph.outputs["z"] = draw(st.sampled_from(arrays[1:]))
    return graph


@kernels
@settings(max_examples=30, deadline=None)
@given(gathering())
def test_parts_of_images_are_computed_where_they_belong(graph: Graph) -> None:
    agree(compiled(graph), graph, 1e-4)


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
    net = compiled(graph, known=Choices(dict.fromkeys(names, "winograd")))
    blocks = net._running.schedule.blocks
    needed = [max(call.workspace_bytes for call in step.calls) for step in net._running.schedule.steps]
    assert min(needed[: len(names)]) > 0
    assert [blocks[n].nbytes for n, nbytes in enumerate(needed) if nbytes] == needed[: len(names)]
    assert all(blocks[name].nbytes == graph.types[name].nbytes for name in names[:-1])
    agree(net, graph, 1e-4)


def test_no_more_memory_than_is_needed_at_once() -> None:
    net = compiled(small(1))
    schedule = net._running.schedule
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
