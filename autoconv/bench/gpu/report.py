"""The results of `autoconv bench --device cuda` as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from autoconv.bench.gpu import Result
from autoconv.bench.gpu.agenda import Target
from autoconv.bench.gpu.helper import WITH_VENDORS
from autoconv.bench.statistics import geometric_mean, interval, ratios
from autoconv.bench.suites import OURS
from autoconv.common.text import duration, shape

UNITS = {"copy": ("copy, read and written", 1e12, "TB/s")}


def missing(results: Sequence[Result], wanted: Sequence[Target], left: int) -> list[str]:
    """Why the comparison is not complete: baselines, layers and items that it lacks; empty when it is."""
    machine = _machine_of(results)
    if machine is None:
        return ["the device did not answer"]
    compared = _compared(results)
    found = [f"{name} did not take part: {why}" for name, why in machine["missing"].items()]
    for target in wanted:
        rows = [(layer, compared[layer.key()]) for layer in target.layers if layer.key() in compared]
        if len(rows) < len(target.layers):
            found.append(f"{target.name}: {len(target.layers) - len(rows)} layers were not compared")
        failures = ((layer, name, why) for layer, row in rows for name, why in row["failures"].items())
        found += [f"{layer}: {name}: {why}" for layer, name, why in failures if name not in machine["missing"]]
    if left:
        found.append(f"{left} items were not reached")
    return list(dict.fromkeys(found))


def markdown(results: Sequence[Result], wanted: Sequence[Target], left: int) -> str:
    """Machine, ceilings, checks, geometric means by target, and every layer; what is missing is INCOMPLETE."""
    incomplete = [f"INCOMPLETE: {reason}" for reason in missing(results, wanted, left)]
    machine = _machine_of(results)
    if machine is None:
        return "\n".join(incomplete) + "\n"
    lines = [*_machine(machine), *_ceilings(results), *_checks(results), *_sanitized(results), *_model(results)]
    compared = _compared(results)
    baselines = list(machine["baselines"])
    summary, details = [], []
    for target in wanted:
        rows = [(layer, compared[layer.key()]) for layer in target.layers if layer.key() in compared]
        cells = [_mean([_ratios(row, ours, theirs) for _, row in rows]) for ours, theirs in _pairs(baselines)]
        summary.append([target.name, f"{len(rows)} of {len(target.layers)}", *cells])
        for layer, row in rows:
            times = row["times"].get(OURS)
            cells = [_cell(_ratios(row, ours, theirs)) for ours, theirs in _pairs(baselines)]
            candidate = row["candidates"].get(OURS, "-")
            time = duration(statistics.median(times)) if times else "-"
            details.append([target.name, f"N{layer.N} {shape(layer)}", f"`{candidate}`", time, *cells])
    titles = [f"{'' if ours == OURS else 'vendors on, '}vs {theirs}" for ours, theirs in _pairs(baselines)]
    lines += [
        "",
        "Ratios: the other's time over ours, above 1 ours is faster; median of interleaved rounds, each a replay of a "
        "graph over operands larger than the L2, with 95 % intervals. The convolution alone, no epilogue; TF32 off.",
        "",
        *_table(["layers", "compared", *titles], summary),
        "",
        *_table(["target", "layer", "ours, vendors off", "time", *titles], details),
        "",
        *incomplete,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _machine_of(results: Sequence[Result]) -> Result | None:
    return next((r for r in reversed(results) if r["item"] == "machine" and "name" in r), None)


def _compared(results: Sequence[Result]) -> dict[str, Result]:
    """By layer, the latest comparison."""
    return {r["item"].split("/")[-1]: r for r in results if r["item"].startswith("table/") and "times" in r}


def _pairs(baselines: Sequence[str]) -> list[tuple[str, str]]:
    return [(ours, theirs) for ours in (OURS, WITH_VENDORS) for theirs in ("the best", *baselines)]


def _ratios(row: Result, ours: str, theirs: str) -> list[float] | None:
    """Round by round; vendors on, without a time of its own, is the same candidate as vendors off."""
    times: dict[str, list[float]] = row["times"]
    mine = times.get(ours) or times.get(OURS)
    others = {name: found for name, found in times.items() if name not in (OURS, WITH_VENDORS)}
    if mine is None or not others:
        return None
    best = min(others, key=lambda name: statistics.median(others[name]))
    name = best if theirs == "the best" else theirs
    return ratios(others[name], mine) if name in others else None


def _mean(found: Sequence[list[float] | None]) -> str:
    """Of the layers for which there are both, and of how many that is where some lack one."""
    known = [rounds for rounds in found if rounds is not None]
    text = str(geometric_mean(known) or "-")
    return text if len(known) in (0, len(found)) else f"{text}, {len(known)} layers"


def _cell(rounds: list[float] | None) -> str:
    return str(interval(rounds)) if rounds else "-"


def _machine(machine: Result) -> list[str]:
    def listed(found: dict[str, Any]) -> str:
        return ", ".join(f"{name} {value}" for name, value in found.items())

    return [
        f"# {machine['name']}",
        "",
        f"- {listed(machine['versions'])}; autoconv {machine['autoconv']}, commit {machine['commit']}",
        f"- against {listed(machine['baselines'])}; vendor candidates: {listed(machine['vendors']) or 'none'}",
    ]


def _ceilings(results: Iterable[Result]) -> Iterable[str]:
    for result in results:
        kind, _, what = result["item"].partition("/")
        if kind == "ceiling" and "per_second" in result:
            name, unit, text = UNITS.get(what, (f"matrix product of cuBLAS in {what}", 1e12, "TFLOP/s"))
            yield f"- {name}: {result['per_second'] / unit:.2f} {text}"
        elif kind == "host" and "above" in result:
            yield f"- host time of a run: {result['run'] * 1e6:.1f} us, {result['above'] * 1e6:.1f} above its launches"


def _checks(results: Iterable[Result]) -> Iterable[str]:
    networks = [r for r in results if r["item"].startswith("network/")]
    agreeing = [r["item"].split("/", 2)[2] for r in networks if "failure" not in r]
    if networks:
        wrong = len(networks) - len(agreeing)
        yield f"- networks against the CPU's answers: {', '.join(agreeing) or 'none'} right, {wrong} not"
        yield from (f"  - {r['item']}: {r['failure']}" for r in networks if "failure" in r)
    found = [r for r in results if r["item"].startswith(("check/", "launch/", "operator/"))]
    if found:
        bad = [r for r in found if "failure" in r]
        skipped = sum("skipped" in r for r in found)
        right = len(found) - len(bad) - skipped
        yield f"- kernels against float64: {right} right, {len(bad)} not, {skipped} not for this GPU"
        yield from (f"  - {r['item']}: {r.get('candidate', '')} {r.get('layer', '')}: {r['failure']}" for r in bad)


def _sanitized(results: Iterable[Result]) -> Iterable[str]:
    for result in results:
        if result["item"].startswith("sanitize/"):
            said = result.get("failure") or result.get("skipped") or "nothing to complain of"
            yield f"- compute-sanitizer on {result['item'].split('/')[1]}: {said}"


def _model(results: Sequence[Result]) -> Iterable[str]:
    """How far the estimates are from what was timed, and what it costs to go by them."""
    latest = {r["item"].split("/")[-1]: r for r in results if r["item"].startswith("tune/") and r.get("predicted")}
    errors, costs = [], []
    for result in latest.values():
        timed = {name: result["timings"][name] for name in result["predicted"] if result["timings"].get(name)}
        if timed:
            errors += [abs(result["predicted"][name] / seconds - 1) for name, seconds in timed.items()]
            costs.append(timed[min(timed, key=result["predicted"].__getitem__)] / min(timed.values()))
    if costs:
        yield (
            f"- estimates of {len(errors)} candidates of {len(costs)} layers: median error "
            f"{100 * statistics.median(errors):.0f} %; the first choice takes "
            f"{statistics.geometric_mean(costs):.2f} of the least time (geometric mean), at worst {max(costs):.2f}"
        )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]
