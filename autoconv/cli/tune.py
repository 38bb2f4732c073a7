"""The verb `autoconv tune`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from autoconv.cli.options import (
    FAILED,
    INTERRUPTED,
    OK,
    as_json,
    batches,
    check_mode,
    device_named,
    directions,
    isolated,
    jobs_of,
    networks_of,
    on_device,
    options_of_plan,
    seconds,
    share,
    threads,
    with_limits,
)
from autoconv.cli.output import all_kept, failure_line, print_cut_short, print_json, progress_bar, say, say_interrupted
from autoconv.cli.tables import Row, Table
from autoconv.common.text import count
from autoconv.errors import FAILURES
from autoconv.layer import ConvLayer
from autoconv.networks import NamedLayer, Network
from autoconv.networks.compiled.loading import load
from autoconv.records.failures import NO_CANDIDATE
from autoconv.tuning.choice import TIMING
from autoconv.tuning.planner import plan, resolved_cache, unwatch, watch

if TYPE_CHECKING:
    from autoconv.plans import Plan

OF_LAYOUTS = 0.5  # of a budget, as much as so many of the layers of a model have goes to its layouts
OF_LAYERS = ("tolerance", "weights")  # limits of a layer by itself: a network's error is another, its filters constant


@click.command(short_help="Time what has no facts yet, and show who wins.")
@click.argument("nets", nargs=-1, required=True, metavar="NET...")
@batches
@directions
@on_device
@threads
@click.option(
    "--budget",
    type=seconds,
    metavar="TIME",
    help="For timing all layers together, such as 60s; compiling them may take longer.",
)
@click.option(
    "--mode",
    default="profile",
    help="profile, hybrid, heuristic, cached, or an algorithm or candidate. [default: profile]",
)
@with_limits
@isolated
@as_json
def tune(
    nets: Sequence[str],
    batch: tuple[int, ...] | None,
    direction: tuple[str, ...] | None,
    device_name: str,
    threads: int | None,
    budget: float | None,
    mode: str,
    isolate: bool,
    as_json: bool,
    **limits: Any,
) -> int:
    """Time every candidate for every layer of NET, keep the facts, and show who wins.

    What is on record is not timed again. Ctrl-C keeps what is done; the same command then goes on from
    there. Without a budget, those near the best race once more when all layers are done: what disturbs a machine
    passes. Of an ONNX file those layers are timed in NHWC, too, that may make the whole network quicker so, and what
    lies between layers: a third of a budget is kept for that. A tolerance is one of each layer by itself.
    """
    started = time.monotonic()
    end = None if budget is None else started + budget
    asked = [(path, *each) for path in nets for each in networks_of(path, batch)]
    device, cache = device_named(device_name, threads), resolved_cache(None)
    jobs = [(n, job) for n, (_, net, sizes) in enumerate(asked) for job in jobs_of([net], sizes, direction, device)]
    check_mode(mode, device)
    options = options_of_plan(limits) | {"device": device, "cache": cache, "isolate": isolate}
    rows: dict[tuple[int, int, str], list[Row]] = {}  # by the network's place, as two may have one name
    models = _models(asked) if mode in TIMING and "fwd" in (direction or ("fwd",)) else []
    later = sum(parts for *_, parts in models)
    laid, interrupted = list[dict[str, Any]](), False
    with progress_bar(len(jobs)) as begin, _watched() as plans:
        try:
            if mode in TIMING:
                turned = time.monotonic()
                with cache.timing_lock(device.key):
                    end = None if end is None else end + time.monotonic() - turned  # what others take is not ours
                    device.survey()
            for place, (n, job) in enumerate(jobs):
                label = f"{job.net.name} {job.named.name}"
                timing = {"budget": share(end, len(jobs) - place + later), "progress": begin(place, label)}
                row = _tuned(job.named, job.layer, mode, options | timing)
                rows.setdefault((n, job.batch, job.layer.direction), []).append(row)
            for path, size, parts in models:
                try:
                    laid.append(_laid_out(path, size, mode, end, later / parts, options))
                except FAILURES as failure:  # its layers can be tuned, but it cannot run, or not for so many images
                    laid.append({"model": path, "batch": size, "error": failure_line(failure)})
                later -= parts
        except KeyboardInterrupt:
            interrupted = True
    if budget is None and not interrupted:
        interrupted = not _raced_once_more(rows.values(), mode, options)
    done = [row for found in rows.values() for row in found]
    peaks = {dtype: device.measured_peak(dtype) for dtype in {row.layer.dtype for row in done}}
    tables = [Table(asked[n][1].name, size, way, tuple(found)) for (n, size, way), found in rows.items()]
    timed = sum(made.timed for made in plans.values())
    failed = [f"{row.name}: {row.error}" for row in done if row.error]
    failures = [f"{found['model']}: layouts: {found['error']}" for found in laid if "error" in found]
    seconds = time.monotonic() - started
    if as_json:
        print_json(
            {
                "device": {"name": device.name, "key": device.key, "versions": device.versions},
                "peak_gflops": {dtype: peak / 1e9 for dtype, peak in peaks.items()},
                "tables": [table.to_json(peaks) for table in tables],
                "layouts": laid,
                "timed": timed,
                "elapsed": seconds,
                "interrupted": interrupted,
            }
        )
    else:
        for table in tables:
            table.print(peaks)
        for found in laid:
            if "error" not in found:
                click.echo(f"{found['network']}: {found['in_nhwc']} of {found['layers']} layers in NHWC")
        click.echo(f"on {device.name}; peak: {_rates(peaks)}")
        click.echo(_summary(len(done), len(jobs), timed, bool(models), len(failed), seconds))
        if budget is not None:
            print_cut_short([row.plan.cut_short for row in done if row.plan])
    _warn(done)
    for line in failed + failures:
        say("error", line)
    if interrupted:
        say_interrupted(len(done), len(jobs))
        return INTERRUPTED
    return FAILED if failed or failures or not all_kept() else OK


def _tuned(named: NamedLayer, layer: ConvLayer, mode: str, options: dict[str, Any]) -> Row:
    """The plan for a layer of a network, or why there is none."""
    found, error = None, None
    try:
        found = plan(layer, mode, **options)
    except FAILURES as failure:
        error = failure_line(failure)
    return Row(named.name, layer, named.repeat, found, error)


def _raced_once_more(tables: Iterable[list[Row]], mode: str, options: dict[str, Any]) -> bool:
    """Let those near the best of each layer that was timed now race again, later than before; False if interrupted."""
    jobs = [(table, n) for table in tables for n, row in enumerate(table) if row.plan is not None and row.plan.timed]
    with progress_bar(len(jobs)) as begin:
        for place, (table, n) in enumerate(jobs):
            first, progress = table[n].plan, begin(place, f"{table[n].name}, once more")
            assert first is not None
            try:
                made = plan(first.layer, mode, again=True, progress=progress, **options)
            except KeyboardInterrupt:
                return False
            except FAILURES:  # the first choice stands
                continue
            made.timed, made.source = first.timed, first.source  # it is the plan that these were timed for
            table[n] = replace(table[n], plan=made)
    return True


def _models(asked: Sequence[tuple[str, Network, tuple[int, ...] | None]]) -> list[tuple[str, int, float]]:
    """The ONNX files among what is asked for, at every batch size; and how many layers' time their layouts have."""
    return [
        (path, size, OF_LAYOUTS * max(1, len(net.layers)))
        for path, net, sizes in asked
        if path.endswith(".onnx")
        for size in sizes or net.batches
    ]


def _laid_out(
    path: str, batch: int, mode: str, end: float | None, parts: float, options: dict[str, Any]
) -> dict[str, Any]:
    """What came of choosing the layouts of a whole network, for which there is one part of the time until the end."""
    net = load(path, batch, **{name: value for name, value in options.items() if name not in OF_LAYERS})
    net.tune(mode, budget=share(end, parts * max(1, len(net.plans))))
    in_nhwc = len(net.in_nhwc & net.plans.keys())
    return {
        "model": path,
        "batch": batch,
        "network": net.graph.name,
        "layers": len(net.plans),
        "in_nhwc": in_nhwc,
    }


@contextmanager
def _watched() -> Iterator[dict[int, Plan]]:
    """Every plan that is asked for meanwhile, once: those of the layers of a whole network, too."""
    found: dict[int, Plan] = {}

    def note(made: Plan) -> None:
        found[id(made)] = made

    watch(note)
    try:
        yield found
    finally:
        unwatch(note)


def _warn(done: Sequence[Row]) -> None:
    """Of candidates that failed: their kernels could not be built, crashed, or gave a wrong answer."""
    for row in done:
        facts = row.plan.facts if row.plan else {}
        failures = [
            (name, each.failure)
            for name, each in facts.items()
            if each.failure and not each.unreached and each.failure != NO_CANDIDATE
        ]
        if failures:
            (name, why), *others = failures
            more = f", and {len(others)} more, as explain says" if others else ""
            say("warning", f"{row.name}: {name} failed: {failure_line(why)}{more}")


def _summary(done: int, total: int, timed: int, whole: bool, failed: int, seconds: float) -> str:
    layers = count(done, "layer") if done == total else f"{done} of {count(total, 'layer')}"
    nothing = "no candidate timed" if whole else "nothing timed"  # of a whole network other things may have been
    work = f"{count(timed, 'candidate')} timed" if timed else nothing
    return f"{layers}, {work}" + (f", {failed} failed" if failed else "") + f", in {seconds:.1f} s"


def _rates(peaks: dict[str, float]) -> str:
    return ", ".join(f"{peak / 1e9:.0f} GFLOP/s in {dtype}" for dtype, peak in sorted(peaks.items())) or "not measured"
