"""The result of `autoconv bench` as a table, as JSON and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from autoconv.bench.baselines import PEERS
from autoconv.bench.suites import BEHIND, KINDS, OURS, Ratio, Row, Suite, interval, kind, ratios
from autoconv.cli.tables import duration, print_table, shape

INK, MUTED = "#222222", "#777777"
COLOURS = dict(zip(KINDS, ("#0b6fa4", "#5b8c2a", "#c46a00", "#8a4f9e", "#6b7280"), strict=True))


def versions(suite: Suite) -> str:
    """The libraries that took part."""
    peers = [PEERS[name] for name in suite.setting.peers]
    return ", ".join(dict.fromkeys(f"{peer.packages[0]} {peer.version}" for peer in peers)) or "nobody"


def caption(suite: Suite) -> list[str]:
    """How to read the table, and who took part."""
    setting = suite.setting
    ours = "ours: only exact algorithms, " if setting.exact else "ours: "
    weights = "constant, transformed beforehand" if setting.constant else "varying, transformed in every run"
    given = " and to ONNX Runtime" if "onnxruntime" in setting.peers else ""
    memory = "a fresh output in every run" if setting.fresh else f"out= given to ours{given}"
    filters = "" if setting.direction == "wgrad" else f"filters {weights}; "
    return [
        f"on {setting.device.name}, against {versions(suite)}, with as many threads each; vendors off",
        f"{ours}NCHW arrays in and out, conversions in the time; torch_cl: channels_last tensors, made before",
        f"{filters}{memory}; torch has no out= and always makes a new one; caches as the run before left them",
        f"ratios: the peer's time over ours, above 1 ours is faster; median of {setting.rounds} interleaved rounds "
        "[95 % interval]",
    ]


def print_suite(suite: Suite) -> None:
    """Write the table, its caption, and what makes it incomplete, to standard output."""
    setting = suite.setting
    peers = list(setting.peers)
    ratios = [">vs best", *(f">vs {peer}" for peer in peers)]
    print_table(
        f"{suite.name}, batch {suite.batch}, {setting.direction}, float32",
        ["layer", "shape", "ours", ">time", ">GFLOP/s", "best peer", *ratios],
        [_cells(row, peers) for row in suite.rows],
        spare=["shape", ">GFLOP/s", "best peer"],
    )
    means = []
    for name in (*KINDS, None):
        count = sum(name in (None, kind(row.layer)) for row in suite.rows)
        if count:
            found = [_ratio(suite.mean(peer, name)) for peer in ("best", *peers)]
            means.append([name or "all", str(count), *found])
    print_table("geometric means", ["class", ">layers", *ratios], means, totals=True)
    for line in [*caption(suite), *_summary(suite), *suite.notes]:
        click.echo(line)
    for reason in suite.incomplete:
        click.echo(f"INCOMPLETE: {reason}")


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    seconds = row.seconds.get(OURS)
    figures = [duration(seconds), f"{row.layer.flops / seconds / 1e9:.0f}"] if seconds else ["-", "-"]
    found = [row.against(peer) for peer in ("best", *peers)]
    cells = [_ratio(interval(rounds) if rounds else None) for rounds in found]
    name = row.name + (f" x{row.repeat}" if row.repeat > 1 else "")
    return [name, shape(row.layer), row.algorithm or "-", *figures, row.best or "-", *cells]


def _ratio(ratio: Ratio | None) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f} {ratio.high:.2f}]" if ratio else "-"


def _summary(suite: Suite) -> list[str]:
    """Losses, and for a network its sums."""
    found = [row.against("best") for row in suite.rows]
    known = [interval(rounds) for rounds in found if rounds]
    lines = [
        f"{sum(r.behind for r in known)} of {len(known)} layers surely behind (all of the interval under {BEHIND})"
    ]
    for name, total in totals(suite).items():
        lines.append(f"{name}: {', '.join(f'{who} {text}' for who, text in total.items())}")
    return lines


def totals(suite: Suite) -> dict[str, dict[str, str]]:
    """A network's sums over its layers, repeats weighted, and its runs in sequence."""
    if not suite.network:
        return {}
    sums = {name: total for name in (OURS, *suite.setting.peers) if (total := suite.total(name))}
    named = {"sum of the layers, each measured alone": sums}
    named["all layers in sequence, ONNX Runtime in one graph"] = suite.whole
    return {what: _against(times) for what, times in named.items() if OURS in times}


def _against(times: dict[str, list[float]]) -> dict[str, str]:
    cells = {OURS: duration(interval(times[OURS]).median)}
    for name, samples in times.items():
        if name != OURS:
            cells[name] = f"{duration(interval(samples).median)} ({_ratio(interval(ratios(samples, times[OURS])))})"
    return cells


def to_json(suite: Suite) -> dict[str, Any]:
    """All of it in plain JSON types; seconds of every contestant in every round."""
    setting = suite.setting
    contestants = ("best", *setting.peers)

    def plain(ratio: Ratio | None) -> dict[str, float] | None:
        return None if ratio is None else {"median": ratio.median, "low": ratio.low, "high": ratio.high}

    return {
        "suite": suite.name,
        "batch": suite.batch,
        "direction": setting.direction,
        "device": {"name": setting.device.name, "key": setting.device.key, "versions": setting.device.versions},
        "threads": setting.device.threads,
        "peers": {name: PEERS[name].version for name in setting.peers},
        "exact": setting.exact,
        "weights": "constant" if setting.constant else "varying",
        "fresh": setting.fresh,
        "rounds": setting.rounds,
        "incomplete": suite.incomplete,
        "notes": suite.notes,
        "layers": [
            {
                "name": row.name,
                "layer": row.layer.key(),
                "repeat": row.repeat,
                "class": kind(row.layer),
                "algorithm": row.algorithm,
                "best": row.best,
                "ratios": {
                    peer: plain(interval(rounds) if (rounds := row.against(peer)) else None) for peer in contestants
                },
                "seconds": row.times,
                "failures": row.failures,
            }
            for row in suite.rows
        ],
        "means": {peer: plain(suite.mean(peer)) for peer in contestants},
        "class_means": {
            name: {peer: plain(suite.mean(peer, name)) for peer in contestants}
            for name in KINDS
            if any(kind(row.layer) == name for row in suite.rows)
        },
        "sums": {name: suite.total(name) for name in (OURS, *setting.peers)} if suite.network else None,
        "in_sequence": suite.whole or None,
    }


def chart(suites: Sequence[Suite], path: Path) -> None:
    """Draw every layer's ratio to its best peer, a panel per suite, as PNG (or what the name's ending says)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    most = max(len(suite.rows) for suite in suites)
    figure = Figure(figsize=(8.5 * len(suites), 1.9 + 0.27 * most), layout="constrained")
    for axes, suite in zip(figure.subplots(1, len(suites), squeeze=False)[0], suites, strict=True):
        _panel(axes, suite)
    present = {kind(row.layer) for suite in suites for row in suite.rows}
    handles = [Patch(color=COLOURS[name], label=name) for name in KINDS if name in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, facecolor="white")


def _panel(axes: Any, suite: Suite) -> None:
    rows = [(row, interval(rounds)) for row in suite.rows if (rounds := row.against("best"))]
    places = range(len(rows))
    medians = [ratio.median for _, ratio in rows]
    axes.barh(places, medians, height=0.72, color=[COLOURS[kind(row.layer)] for row, _ in rows])
    spans = [[r.median - r.low for _, r in rows], [r.high - r.median for _, r in rows]]
    axes.errorbar(medians, places, xerr=spans, fmt="none", ecolor=INK, elinewidth=0.9, capsize=2)
    axes.axvline(1, color=INK, linewidth=1)
    for place, (row, ratio) in zip(places, rows, strict=True):
        text = f" {ratio.median:.2f}  {(row.algorithm or '').partition('[')[0]}"
        axes.annotate(
            text, (ratio.high, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )
    axes.set_yticks(places, [row.name for row, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max([1.0, *(r.high for _, r in rows)]))
    axes.set_xlabel("times as fast as the best peer of the layer (line: equal), with 95 % intervals", fontsize=9)
    mean = suite.mean("best")
    result = f": geometric mean {mean.median:.2f}" if mean else ""
    title = f"{suite.name}, batch {suite.batch}, {suite.setting.direction}{result}"
    axes.set_title(title + (" (INCOMPLETE)" if suite.incomplete else ""), fontsize=11, loc="left", pad=18)
    subtitle = f"{suite.setting.device.name}; against {versions(suite)}"
    axes.text(0, 1, subtitle, transform=axes.transAxes, va="bottom", fontsize=8, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
