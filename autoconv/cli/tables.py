"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoconv import __version__, registry
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.networks.layers import names
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits, ranking
from autoconv.records.schema import Record

PLAIN_GEMM = {"cpu": "numpy.gemm", "cuda": "gemm.explicit"}  # im2col and the library's matrix product
ENVIRONMENT = ("AUTOCONV_CACHE_DIR", "AUTOCONV_KERNEL_DIR", "AUTOCONV_NUM_THREADS", "AUTOCONV_ISA")
OPTIONAL = {
    "onnxruntime": "a library to compare with; pip install 'autoconv[bench]'",
    "torch": "a library to compare with; pip install 'autoconv[bench]'",
    "matplotlib": "draws charts; pip install 'autoconv[report]'",
}
PIPED_WIDTH = 1000  # characters: nothing is cut where nobody sees the edge
FOLDED = 18  # characters to which a narrow terminal folds a column of names


@dataclass(frozen=True)
class Row:
    """One layer of a network and the plan for it, or the error in its place."""

    name: str
    layer: ConvLayer
    repeat: int
    plan: Plan | None = None
    error: str | None = None

    @property
    def seconds(self) -> float | None:
        """Measured time of the winner; None where nothing was measured."""
        return self.plan.timings.get(str(self.plan.candidate)) if self.plan else None

    @property
    def runner_up(self) -> str | None:
        """The best of the others that the limits allow."""
        others = [n for n in self.plan.ranking if n != str(self.plan.candidate)] if self.plan else []
        return others[0] if others else None

    @property
    def gemm_seconds(self) -> float | None:
        """Measured time of plain GEMM, at its best parameters; what every other way is compared with."""
        if self.plan is None:
            return None
        algorithm = PLAIN_GEMM[self.plan.device.kind]
        return min((t for n, t in self.plan.timings.items() if n.partition("[")[0] == algorithm), default=None)

    @property
    def origin(self) -> str:
        """Whether the answer was timed now, found in the cache, estimated, named by the user, or is missing."""
        if self.plan is None:
            return "failed"
        return {"profile": "new", "cache": "cached"}.get(self.plan.source, self.plan.source)


@dataclass(frozen=True)
class Table:
    """The layers of one network at one batch size, in one direction."""

    network: str
    batch: int
    direction: str
    rows: tuple[Row, ...]

    @property
    def seconds(self) -> float | None:
        """Sum over all layers, repeats counted; None unless every layer has a measured time."""
        return _weighted([(row.seconds, row.repeat) for row in self.rows])

    @property
    def gemm_seconds(self) -> float | None:
        """The same for plain GEMM."""
        return _weighted([(row.gemm_seconds, row.repeat) for row in self.rows])

    @property
    def flops(self) -> int:
        """Operations of all layers, repeats counted."""
        return sum(row.layer.flops * row.repeat for row in self.rows)

    def to_json(self, peaks: dict[str, float]) -> dict[str, Any]:
        """Plain JSON types; seconds, and fractions of `peaks` (FLOP/s by dtype)."""
        return {
            "network": self.network,
            "batch": self.batch,
            "direction": self.direction,
            "layers": [_row_json(row, peaks) for row in self.rows],
            "seconds": self.seconds,
            "gemm_seconds": self.gemm_seconds,
            "flops": self.flops,
        }

    def print(self, peaks: dict[str, float]) -> None:
        """Write the table to standard output."""
        rows = [_row_cells(row, peaks) for row in self.rows]
        rows.append(["total", "", "", *_figures(self.seconds, self.flops, None), "", gain(self), ""])
        print_table(
            f"{self.network}, batch {self.batch}, {self.direction}",
            ["layer", "shape", "winner", ">time", ">GFLOP/s", ">of peak", "runner-up", ">vs GEMM", "from"],
            rows,
            totals=True,
            spare=["runner-up", "shape", ">of peak", ">GFLOP/s"],
        )


def gain(timed: Row | Table) -> str:
    """How many times as fast as plain GEMM."""
    return f"{timed.gemm_seconds / timed.seconds:.2f}x" if timed.gemm_seconds and timed.seconds else "-"


def shape(layer: ConvLayer) -> str:
    """A layer in a few characters: input, filters, and what is not at its default."""
    text = f"{layer.C}x{layer.H}x{layer.W} {layer.K}x{layer.R}x{layer.S}"
    for letter, (height, width) in (("s", layer.stride), ("d", layer.dilation)):
        if (height, width) != (1, 1):
            text += f" {letter}{height}" + (f"x{width}" if width != height else "")
    return text + (f" g{layer.groups}" if layer.groups > 1 else "")


def duration(seconds: float) -> str:
    """Three significant digits, and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _weighted(times: Sequence[tuple[float | None, int]]) -> float | None:
    known = [seconds * repeat for seconds, repeat in times if seconds is not None]
    return sum(known) if known and len(known) == len(times) else None


def _figures(seconds: float | None, flops: int, peak: float | None) -> list[str]:
    if seconds is None:
        return ["-", "-", "-" if peak else ""]
    return [duration(seconds), f"{flops / seconds / 1e9:.1f}", f"{flops / seconds / peak:.0%}" if peak else ""]


def _row_cells(row: Row, peaks: dict[str, float]) -> list[str]:
    name = row.name + (f" x{row.repeat}" if row.repeat > 1 else "")
    if row.plan is None:
        return [name, shape(row.layer), row.error or "", "", "", "", "", "", row.origin]
    figures = _figures(row.seconds, row.layer.flops, peaks[row.layer.dtype])
    second = row.runner_up
    slower = row.plan.timings.get(second or "")
    if second and slower and row.seconds:
        second += f" {slower / row.seconds:.2f}x"
    return [name, shape(row.layer), str(row.plan.candidate), *figures, second or "-", gain(row), row.origin]


def _row_json(row: Row, peaks: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": row.name, "layer": row.layer.key(), "repeat": row.repeat, "from": row.origin}
    if row.plan is None:
        return found | {"error": row.error}
    seconds, second = row.seconds, row.runner_up
    rate = row.layer.flops / seconds if seconds else None
    return found | {
        "winner": str(row.plan.candidate),
        "seconds": seconds,
        "gflops": rate / 1e9 if rate else None,
        "of_peak": rate / peaks[row.layer.dtype] if rate else None,
        "workspace_bytes": row.plan.workspace_bytes,
        "runner_up": second,
        "runner_up_seconds": row.plan.timings.get(second) if second else None,
        "gemm_seconds": row.gemm_seconds,
        "timed": row.plan.timed,
    }


def standing(record: Record) -> dict[str, Any]:
    """Who wins a record when anything is allowed, and where that comes from; plain JSON types."""
    facts = record.facts()
    best = next(iter(ranking(facts, Limits(allow_tf32=True))), None)
    races = [race for race in record.races if best is None or (best in race.facts and race.facts[best].timed)]
    return {
        "device": record.device,
        "layer": record.layer,
        "winner": str(best) if best else None,
        "seconds": facts[best].time if best else None,
        "candidates": len(facts),
        "races": [
            {"id": r.id, "when": r.when, "isolated": r.isolated, "candidates": len(r.facts), "versions": r.versions}
            for r in races
        ],
    }


def print_standings(device: str, standings: Sequence[dict[str, Any]]) -> None:
    """The winners on one device as a table."""
    rows = []
    for found in standings:
        last = found["races"][-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        rows.append(
            [
                found["layer"],
                found["winner"] or "none",
                duration(found["seconds"]) if found["seconds"] else "-",
                str(found["candidates"]),
                last["when"][:16].replace("T", " ") + ("" if last["isolated"] else ", in process"),
                versions,
            ]
        )
    columns = ["layer", "winner", ">time", ">candidates", "raced (UTC)", "versions"]
    print_table(device, columns, rows, spare=["versions", ">candidates", "raced (UTC)"])


def information(device: Device, cache: TuningCache) -> dict[str, Any]:
    """What `info` says, in plain JSON types."""
    from autoconv.cuda.device import why_unavailable

    records = [record.device for record in cache.records()]
    missing = {name: how for name, how in OPTIONAL.items() if importlib.util.find_spec(name) is None}
    if gpu := why_unavailable():
        missing["GPU"] = gpu
    return {
        "autoconv": __version__,
        "python": platform.python_version(),
        "device": {
            "key": device.key,
            "name": device.name,
            **{name: value for name, value in device.facts.items() if name != "name"},
            "peak_gflops": {dtype: device.measured_peak(dtype) / 1e9 for dtype in ("float32", "float64")},
        },
        "algorithms": [algorithm.name for algorithm in registry.algorithms(device)],
        "versions": device.versions,
        "cache": {
            "directory": str(cache.directory),
            "persistent": cache.persistent,
            "records": len(records),
            "of_this_device": records.count(device.key),
            "shipped": str(cache.system),
        },
        "networks": names(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "missing": missing,
    }


def print_information(found: dict[str, Any]) -> None:
    """The same for people, one line per fact."""
    device, cache = found["device"], found["cache"]
    peak = ", ".join(f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in device["peak_gflops"].items())
    caches = ", ".join(f"L{n} {device[f'l{n}_bytes'] >> 10} KiB" for n in (1, 2, 3) if f"l{n}_bytes" in device)
    lines = [
        ("autoconv", f"{found['autoconv']} on Python {found['python']}"),
        ("device", device["name"]),
        ("", device["key"]),
        ("", f"measured: {peak}; {caches}"),
        ("algorithms", ", ".join(found["algorithms"])),
        ("versions", ", ".join(f"{name} {number}" for name, number in found["versions"].items())),
        ("cache", cache["directory"] + ("" if cache["persistent"] else "; cannot be written: nothing will be kept")),
        ("", f"{cache['records']} records, {cache['of_this_device']} of this device; shipped: {cache['shipped']}"),
        ("networks", ", ".join(found["networks"])),
        *(("environment", f"{name}={value}") for name, value in found["environment"].items()),
        *(("missing", f"{name}: {how}") for name, how in found["missing"].items()),
    ]
    sys.stdout.writelines(f"{label:<12} {text}\n" for label, text in lines)


def print_json(document: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    totals: bool = False,
    spare: Sequence[str] = (),
) -> None:
    """A table on standard output; `>` before a column's name aligns it to the right, `totals` sets off the last row.

    A narrow terminal does without the columns of `spare`, one after the other, before figures are folded.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    terminal = sys.stdout.isatty()
    text = sys.stdout if terminal else io.StringIO()
    console = Console(file=text, width=None if terminal else PIPED_WIDTH, no_color=not terminal, highlight=False)
    table = RichTable(title=Text(title, "bold"), title_justify="left", box=box.ASCII2 if _ascii() else box.SIMPLE_HEAD)
    rows, left_out = list(rows), []
    shown = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
    for column in spare:
        if _least_width(shown) > console.width:
            del shown[column]
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


def _least_width(table: dict[str, list[str]]) -> int:
    """Characters that a table needs in which long names are folded, and nothing else is."""
    return 1 + sum(3 + min(_width(column, cells), FOLDED) for column, cells in table.items())


def _ascii() -> bool:
    return not (sys.stdout.encoding or "").lower().startswith("utf")
