"""The result of `autoconv bench` as a table and as a chart."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoconv.bench.baselines import ALL_BASELINES
from autoconv.bench.statistics import BEHIND, Ratio, interval, ratios
from autoconv.bench.suites import CLASSES, OURS, Row, Suite, class_of
from autoconv.common.text import duration, print_table, shape
from autoconv.paths import write_whole

PICTURES = ("", ".png", ".svg", ".pdf")  # what a name may end in
INK, MUTED = "#222222", "#777777"
COLOURS = dict(zip(CLASSES, ("#0b6fa4", "#5b8c2a", "#c46a00", "#8a4f9e", "#6b7280"), strict=True))


def versions(suite: Suite) -> str:
    """The libraries that took part."""
    baselines = [ALL_BASELINES[name] for name in suite.setting.baselines]
    return ", ".join(dict.fromkeys(f"{b.packages[0]} {b.version}" for b in baselines)) or "none"


def caption(suite: Suite) -> list[str]:
    """How to read the table, and who took part."""
    setting = suite.setting
    threads = ", with the same number of threads" if setting.baselines else ""
    algorithms = "only exact algorithms; " if setting.exact else ""
    filters = "constant, transformed beforehand" if setting.constant else "varying, transformed in every run"
    baselines = [ALL_BASELINES[name] for name in setting.baselines]
    own = {b.tensors: [o.name for o in baselines if o.tensors == b.tensors] for b in baselines if b.tensors}
    untimed = "".join(f"; {', '.join(names)}: tensors in {tensors}, made before" for tensors, names in own.items())
    if setting.fresh:
        output = "a new array in every run"
    else:
        output = f"one array reused by {', '.join([OURS, *(b.name for b in baselines if b.reuses)])}"
        always = [b.name for b in baselines if not b.reuses]
        output += f"; always new in {', '.join(always)}" if always else ""
    layouts = " and ".join(sorted({row.layer.layout for row in suite.rows})) or "NCHW"
    operands = f"output: {output}" if setting.direction == "wgrad" else f"filters: {filters}; output: {output}"
    return [
        f"on {setting.device.name}; baselines: {versions(suite)}{threads}",
        f"autoconv: {algorithms}vendor libraries off; {layouts} arrays in and out, layout conversions timed{untimed}",
        f"{operands}; caches: as the previous run left them",
        "over bound: autoconv's time over the least that its multiplications, or its operands' bytes, should take by "
        "the measured machine; transforms not counted; below 1 caches held what the model has come from slower memory",
        "ratios: the baseline's time divided by autoconv's, so that above 1 autoconv is faster; "
        f"median of {setting.rounds} interleaved rounds [95 % interval]",
    ]


def print_suite(suite: Suite) -> None:
    """Write the table, its caption, and what makes it incomplete, to standard output."""
    setting = suite.setting
    baselines = list(setting.baselines)
    columns = [">vs best", *(f">vs {name}" for name in baselines)]
    print_table(
        f"{suite.name}, batch {suite.batch}, {setting.direction}, {setting.dtype}",
        ["layer", "shape", "candidate", ">time", ">GFLOP/s", ">over bound", "best baseline", *columns],
        [_cells(row, baselines) for row in suite.rows],
        spare=["shape", ">GFLOP/s", ">over bound", "best baseline"],
    )
    means = []
    for name in (*CLASSES, None):
        count = sum(name in (None, class_of(row.layer)) for row in suite.rows)
        if count:
            found = [_mean(suite, baseline, name) for baseline in ("best", *baselines)]
            means.append([name or "all", str(count), *found])
    print_table("geometric means", ["class", ">layers", *columns], means, totals=True)
    lines = [*caption(suite), *_summary(suite), *suite.remarks]
    lines += [f"not compared: {reason}" for reason in suite.left_out]
    lines += [f"INCOMPLETE: {reason}" for reason in suite.incomplete]
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _cells(row: Row, baselines: Sequence[str]) -> list[str]:
    seconds = row.seconds.get(OURS)
    figures = [duration(seconds), f"{row.layer.flops / seconds / 1e9:.0f}"] if seconds else ["-", "-"]
    cells = [_text(_ratio(row, baseline)) for baseline in ("best", *baselines)]
    name = row.name + (f" x{row.repeat}" if row.repeat > 1 else "")
    figures.append(f"{row.over_bound:.2f}" if row.over_bound else "-")
    return [name, shape(row.layer), row.candidate or "-", *figures, row.best or "-", *cells]


def _ratio(row: Row, baseline: str) -> Ratio | None:
    rounds = row.against(baseline)
    return interval(rounds) if rounds else None


def _text(ratio: Ratio | None) -> str:
    return str(ratio or "-")


def _mean(suite: Suite, baseline: str, of: str | None) -> str:
    """With the number of layers in parentheses, where the baseline cannot compute all."""
    mean, count = _text(suite.mean(baseline, of)), len(suite.counted(baseline, of))
    return mean if count == len(suite.counted(OURS, of)) else f"{mean} ({count})"


def _summary(suite: Suite) -> list[str]:
    """Losses, and for a network its sums."""
    known = [ratio for row in suite.rows if (ratio := _ratio(row, "best"))]
    lines = []
    if known:
        behind = f"{sum(ratio.behind for ratio in known)} of {len(known)} layers"
        lines.append(f"slower than the best baseline: {behind} (the whole interval below {BEHIND})")
    worst = {
        name: max((row.errors.get(name, 0.0) for row in suite.rows), default=0.0) for name in suite.setting.baselines
    }
    if any(worst.values()):
        told = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
        lines.append(f"largest difference between an answer and autoconv's, of the largest value: {told}")
    for name, total in totals(suite).items():
        lines.append(f"{name}: {', '.join(f'{who} {text}' for who, text in total.items())}")
    if suite.waiting:
        titles = {"alone": "of its layers timed alone", "recorded": "on record, with cold filters"}
        told = " and ".join(f"{ratio:.2f} times the sum {titles[what]}" for what, ratio in suite.waiting.items())
        lines.append(f"in sequence {OURS} takes {told}")
    return lines


def totals(suite: Suite) -> dict[str, dict[str, str]]:
    """A network's sums over its layers, repeats weighted, and its runs in sequence."""
    shares = " and ".join(f"{share:.0%}" for share in suite.shares.values())
    titles = {
        "sum": "sum of the layers, each timed alone",
        "sequence": "all layers in sequence, in one graph of ONNX Runtime",
        "exported": f"and the convolutions of the network as exported ({shares} of its time)",
    }
    return {titles[what]: _against(times) for what, times in suite.compared.items()}


def _against(times: dict[str, list[float]]) -> dict[str, str]:
    cells = {OURS: duration(interval(times[OURS]).median)}
    for name, samples in times.items():
        if name != OURS:
            cells[name] = f"{duration(interval(samples).median)} ({interval(ratios(samples, times[OURS]))})"
    return cells


def chart(suites: Sequence[Suite], path: Path) -> None:
    """Draw every layer's ratio to its best baseline, a panel per suite; its name ends in one of `PICTURES`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    most = max(len(suite.rows) for suite in suites)
    figure = Figure(figsize=(8.5 * len(suites), 1.9 + 0.27 * most), layout="constrained")
    for axes, suite in zip(figure.subplots(1, len(suites), squeeze=False)[0], suites, strict=True):
        _panel(axes, suite)
    present = {class_of(row.layer) for suite in suites for row in suite.rows}
    handles = [Patch(color=COLOURS[name], label=name) for name in CLASSES if name in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, format=path.suffix.lower()[1:] or "png", dpi=150, facecolor="white")
    write_whole(path, out.getvalue())


def _panel(axes: Any, suite: Suite) -> None:
    rows = [(row, interval(rounds)) for row in suite.rows if (rounds := row.against("best"))]
    places = range(len(rows))
    medians = [ratio.median for _, ratio in rows]
    axes.barh(places, medians, height=0.72, color=[COLOURS[class_of(row.layer)] for row, _ in rows])
    spans = [[r.median - r.low for _, r in rows], [r.high - r.median for _, r in rows]]
    axes.errorbar(medians, places, xerr=spans, fmt="none", ecolor=INK, elinewidth=0.9, capsize=2)
    axes.axvline(1, color=INK, linewidth=1)
    for place, (row, ratio) in zip(places, rows, strict=True):
        text = f" {ratio.median:.2f}  {(row.candidate or '').partition('[')[0]}"
        axes.annotate(
            text, (ratio.high, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )
    axes.set_yticks(places, [row.name for row, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max([1.0, *(r.high for _, r in rows)]))
    axes.set_xlabel(
        "speed-up over the best baseline of the layer (line: equal), with 95 % intervals",
        fontsize=9,
    )
    mean = suite.mean("best")
    result = f": geometric mean {mean.median:.2f}" if mean else ""
    title = f"{suite.name}, batch {suite.batch}, {suite.setting.direction}{result}"
    axes.set_title(title + (" (INCOMPLETE)" if suite.incomplete else ""), fontsize=11, loc="left", pad=18)
    subtitle = f"{suite.setting.device.name}; baselines: {versions(suite)}"
    axes.text(0, 1, subtitle, transform=axes.transAxes, va="bottom", fontsize=8, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
