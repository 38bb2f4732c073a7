"""What people read: durations, sizes, layers in a few characters, tables and messages of one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoconv.layer import ConvLayer

PIPED_WIDTH = 1000  # characters: nothing is cut where nobody sees the edge
FOLDED = 18  # characters to which a narrow terminal folds a column of names


def digits(value: float) -> str:
    """Three significant digits, and all that a large number has before the point.

    >>> digits(1.2344), digits(999.7), digits(43210.9)
    ('1.23', '1000', '43211')
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Three significant digits and a unit, in ASCII.

    >>> duration(0.0012344), duration(7.93e-4), duration(4321)
    ('1.23 ms', '793 us', '4321 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds * 1e6)} us"


def operations(flops: float) -> str:
    """Operations in the largest unit that leaves at least one.

    >>> operations(1.334e9), operations(2.5e6), operations(1200)
    ('1.33 GFLOP', '2.5 MFLOP', '0.0012 MFLOP')
    """
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            return f"{digits(flops / size)} {unit}"
    return f"{digits(flops / 1e6)} MFLOP"


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least one.

    >>> size(0), size(1536), size(2621440)
    ('0 B', '1.5 KiB', '2.50 MiB')
    """
    if nbytes >= 1 << 20:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "layer"), count(27, "layer")
    ('1 layer', '27 layers')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shape(layer: ConvLayer) -> str:
    """A layer in a few characters: input, filters, and what is not at its default.

    >>> from autoconv.layer import ConvLayer
    >>> shape(ConvLayer(N=1, C=8, H=9, W=10, K=4, R=3, S=1, stride=2, dilation=(1, 2), groups=4))
    '8x9x10 4x3x1 s2 d1x2 g4'
    """
    text = f"{layer.C}x{layer.H}x{layer.W} {layer.K}x{layer.R}x{layer.S}"
    for letter, (height, width) in (("s", layer.stride), ("d", layer.dilation)):
        if (height, width) != (1, 1):
            text += f" {letter}{height}" + (f"x{width}" if width != height else "")
    return text + (f" g{layer.groups}" if layer.groups > 1 else "")


def one_line(message: BaseException | str, length: int = sys.maxsize) -> str:
    r"""A message, or what an exception says, without line breaks, cut at some length.

    >>> one_line(RuntimeError("no kernel\nfor this")), one_line(KeyError())
    ('no kernel for this', 'KeyError')
    """
    if isinstance(message, OSError) and message.strerror:
        message = f"{message.filename}: {message.strerror}" if message.filename else message.strerror
    return (" ".join(str(message).split()) or type(message).__name__)[:length]


def reason(error: BaseException) -> str:
    """What an exception says, on one line, without the file that a message has named already.

    >>> reason(FileNotFoundError(2, "No such file or directory", "x.json")), reason(ValueError("embedded null byte"))
    ('No such file or directory', 'embedded null byte')
    """
    return getattr(error, "strerror", None) or one_line(error)


def nearest(given: str, allowed: Sequence[str]) -> str:
    """The end of a message about an unknown name: the one that was probably meant, if any, and all there are.

    >>> nearest("strid", ["stride", "padding"]), nearest("x", ["stride", "padding"])
    ("did you mean 'stride'? Expected one of stride, padding", 'expected one of stride, padding')
    """
    import difflib

    folded, all_of_them = {name.casefold(): name for name in allowed}, f"xpected one of {', '.join(allowed)}"
    near = difflib.get_close_matches(given.casefold(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}? E{all_of_them}" if near else f"e{all_of_them}"


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    totals: bool = False,
    spare: Sequence[str] = (),
) -> None:
    """Write a table to standard output, in colour on a terminal; in ASCII where the encoding has no lines to draw.

    Parameters
    ----------
    title : str
    columns : sequence of str
        Their names; `>` before one aligns the column to the right.
    rows : iterable of sequences of str
        One cell for each column.
    totals : bool
        Whether the last row is set off by a line.
    spare : sequence of str
        Columns that a narrow terminal does without, the first of them first, before figures are folded; and the first
        also where it leaves room for all the others unfolded.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = sys.stdout if terminal else io.StringIO()
    console = Console(file=text, width=None if terminal else PIPED_WIDTH, no_color=not terminal, highlight=False)
    table = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD if unicode else box.ASCII2)
    rows, left_out = list(rows), []
    shown = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
    for column in spare:
        others = {name: cells for name, cells in shown.items() if name != column}
        unfolds = column == spare[0] and _whole_width(others) <= console.width < _whole_width(shown)
        if unfolds or _least_width(shown) > console.width:
            shown = others
            left_out.append(column.removeprefix(">"))
    fits = _least_width(shown) <= console.width
    for column, cells in shown.items():
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not terminal or (fits and _width(column, cells) <= FOLDED),
            overflow="fold",
        )
    lines = list(zip(*shown.values(), strict=True))
    for i, line in enumerate(lines):
        table.add_row(*map(Text, line), end_section=totals and i == len(lines) - 2)
    console.print(table)
    if left_out:
        console.print(Text(f"  a wider terminal has room for: {', '.join(left_out)}", "dim"))
    if isinstance(text, io.StringIO):
        sys.stdout.writelines(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def _width(column: str, cells: Sequence[str]) -> int:
    return max(map(len, [column.removeprefix(">"), *cells]))


def _whole_width(table: dict[str, list[str]]) -> int:
    """Characters that a table needs in which nothing is folded."""
    return 1 + sum(3 + _width(column, cells) for column, cells in table.items())


def _least_width(table: dict[str, list[str]]) -> int:
    """Characters that a table needs in which long names are folded, and nothing else is."""
    return 1 + sum(3 + min(_width(column, cells), FOLDED) for column, cells in table.items())
