"""What people read: figures with units, tables, and messages of one line."""

from __future__ import annotations

import re
import sys

import pytest

from autoconv.common import text
from autoconv.layer import ConvLayer


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (2.5e-7, "0.25 us"),
        (7.93e-4, "793 us"),
        (0.0012344, "1.23 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1000 ms"),
        (9.997e-4, "1000 us"),
        (12.34, "12.3 s"),
        (4321, "4321 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("flops", "expected"),
    [
        (1200, "0.0012 MFLOP"),
        (9.5e6, "9.5 MFLOP"),
        (1.334e9, "1.33 GFLOP"),
        (9.998e11, "1000 GFLOP"),
        (2e12, "2 TFLOP"),
    ],
)
def test_operations_have_a_unit_that_fits(flops: float, expected: str) -> None:
    assert text.operations(flops) == expected


def test_shapes_show_what_is_not_at_its_default() -> None:
    layer = ConvLayer(N=1, C=8, H=9, W=10, K=4, R=3, S=1, stride=2, dilation=(1, 2), groups=4)
    assert text.shape(layer) == "8x9x10 4x3x1 s2 d1x2 g4"


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.00 MiB"), (5 << 29, "2560.00 MiB")],
)
def test_sizes_have_a_binary_unit(nbytes: int, expected: str) -> None:
    assert text.size(nbytes) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("two\n  lines", "two lines"),
        (RuntimeError(), "RuntimeError"),
        (FileNotFoundError(2, "No such file", "x.json"), "x.json: No such file"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("odd"), "odd"),
    ],
)
def test_a_message_is_one_line(message: Exception | str, expected: str) -> None:
    assert text.one_line(message) == expected
    assert text.one_line(message, 3) == expected[:3]


def test_the_nearest_name_is_found_in_whatever_case() -> None:
    assert text.nearest("c", ["K", "C"]) == "did you mean 'C'? Expected one of K, C"
    assert text.nearest("xyz", ["K", "C"]) == text.nearest("", ["K", "C"]) == "expected one of K, C"


@pytest.mark.parametrize(
    ("columns", "lacking"),
    [(60, ["rival", "shape", "rate"]), (80, ["rival", "shape"]), (100, ["rival"]), (130, ["rival"]), (200, [])],
)
def test_a_narrow_terminal_shows_fewer_columns_and_every_figure(
    columns: int, lacking: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "direct[TK=16,TP=2,TQ=3,BC=16,filters=packed]"
    row = {"layer": "first", "shape": "256x13x13 384x3x3", "winner": name, ">time": "1.29 ms", ">rate": "94.7"}
    row |= {"rival": name, "from": "heuristic, though"}
    text.print_table("title", list(row), [list(row.values())], spare=["rival", "shape", ">rate"])
    *table, last = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, table)) <= columns
    shown = {"rate": "94.7", "shape": row["shape"]}
    for column, cell in shown.items():
        assert (cell in "\n".join(table)) == (column not in lacking)
    assert all(cell in "\n".join(table) for cell in ("1.29 ms", "heuristic, though"))
    assert last.strip() == (f"a wider terminal has room for: {', '.join(lacking)}" if lacking else "")
    assert (name in "\n".join(table)) == (columns >= 130)
