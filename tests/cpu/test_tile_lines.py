"""What register tiles fetch of their outputs: every line that they store to, wherever it begins, in even shares."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from autoconv.cpu.codegen.ir import LINE, Module, f32, ptr
from autoconv.cpu.codegen.lines import WRITTEN_OUT, TileLines, fetch_lines, line_places

SHAPES = {  # channels, rows and columns of a tile, and the strides of an output
    "planes": (32, (1, 14), (196, 14, 1)),
    "planes, several rows": (16, (3, 20), (56 * 56, 56, 1)),
    "channels last": (48, (1, 9), (1, 28 * 512, 512)),
    "channels last, more rows than columns": (32, (7, 2), (1, 28 * 500, 500)),
    "every other column": (16, (2, 13), (4096, 128, 2)),
    "columns lines apart": (8, (1, 5), (4096, 640, 20)),
    "one pixel": (128, (1, 1), (1, 0, 1)),
    "one channel": (1, (1, 64), (784, 0, 1)),
}


def fetches(lines: TileLines, rounds: int, itemsize: int) -> list[list[int]]:
    """The addresses that each round fetches of outputs from address 0 on: places are plain numbers here."""
    found: list[list[int]] = []
    k: Any = SimpleNamespace(prefetch=lambda p, write: found[-1].append(p * itemsize))
    for number in range(rounds):
        found.append([])
        lines.fetch(k, number, rounds, 0, None)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 3, 16, 86])
@pytest.mark.parametrize("name", SHAPES)
def test_every_line_of_a_tile_is_fetched_in_shares(name: str, rounds: int, itemsize: int) -> None:
    channels, (rows, columns), strides = SHAPES[name]
    lines = TileLines.of_tile(channels, (rows, columns), strides, itemsize)
    by_round = fetches(lines, rounds, itemsize)
    assert max(map(len, by_round)) == -(-lines.items // rounds) * len(lines.places)
    stored = [
        sum(n * stride for n, stride in zip(place, strides, strict=True)) * itemsize
        for place in itertools.product(range(channels), range(rows), range(columns))
    ]
    for start in range(0, LINE, itemsize):
        wanted = {(start + place) // LINE for place in stored}
        assert wanted <= {(start + place) // LINE for share in by_round for place in share}


def test_rounds_share_items_evenly() -> None:
    lines = TileLines(6, 100, (0, 16))
    assert [set(share) for share in fetches(lines, 3, 4)] == [
        {0, 64, 400, 464},
        {800, 864, 1200, 1264},
        {1600, 1664, 2000, 2064},
    ]
    assert [min(share) // 400 for share in fetches(lines, 12, 4)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_residual_is_fetched_where_it_is_added() -> None:
    places: list[tuple[int, bool]] = []
    k: Any = SimpleNamespace(prefetch=lambda p, write=False: places.append((p, write)))
    zero: Any = 0
    TileLines(1, 0, (0, 16)).fetch(k, zero, 1, 1000, 2000)  # type: ignore[arg-type]
    assert places == [(2000, False), (1000, True), (2016, False), (1016, True)]
    places.clear()
    TileLines(1, 0, (0,)).fetch(k, zero, 1, None, 2000)  # type: ignore[arg-type]
    assert places == [(2000, False)]


def test_few_places_cover_neighbours() -> None:
    assert line_places(0, 64, 1, 4) == [0, 16, 32, 48, 63]
    assert line_places(7, 3, 20, 4) == [7, 27, 47]
    assert line_places(0, 1, 0, 4) == [0]


@pytest.mark.parametrize(("count", "written"), [(1, 1), (16, 1), (17, 2), (16 * WRITTEN_OUT, WRITTEN_OUT), (5000, 1)])
def test_lines_on_end_are_fetched_once_each_and_many_in_a_loop(count: int, written: int) -> None:
    k = Module("avx2").function("fetch", ptr(f32))
    fetch_lines(k, k.args[0], count)
    assert str(k).count("@llvm.prefetch") == written
    assert (" phi " in str(k) or "br i1" in str(k)) == (count > 16 * WRITTEN_OUT)
