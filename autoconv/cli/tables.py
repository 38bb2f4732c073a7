"""The result of `autoconv tune`: one table for each network, batch size and direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoconv.common.text import duration, one_line, print_table, shape

if TYPE_CHECKING:
    from autoconv.layer import ConvLayer
    from autoconv.plans import Plan

ERROR_WIDTH = 60  # characters of an error in the place of a winner: all of it is told beside the table
PLAIN_GEMM = {"cpu": "numpy.gemm", "cuda": "gemm.explicit"}  # im2col and the library's matrix product


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
        return [name, shape(row.layer), one_line(row.error or "", ERROR_WIDTH), "", "", "", "", "", row.origin]
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
