"""What is known of every candidate for a layer, as a table to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoconv.algorithm import Candidate
from autoconv.common.text import duration, size
from autoconv.layer import ConvLayer
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts


def candidate_table(
    layer: ConvLayer,
    chosen: Candidate,
    ranking: Sequence[Candidate],
    facts: Mapping[Candidate, Facts],
    reasons: Mapping[Candidate, Sequence[str]],
    limits: Limits,
) -> list[str]:
    """Every candidate with its times, spread, error and workspace, then those that are out, with the reasons.

    Parameters
    ----------
    layer : ConvLayer
    chosen : Candidate
        Marked by `>`.
    ranking : sequence of Candidate
        Those that the limits allow, best first; the others follow by their time.
    facts : mapping of Candidate to Facts
    reasons : mapping of Candidate to sequence of str
        Why candidates cannot run, or were not timed.
    limits : Limits

    Returns
    -------
    list of str
        Lines, the first one empty unless there is nothing to tell.
    """
    rank = {candidate: place for place, candidate in enumerate(ranking)}
    timed = {candidate: found for candidate, found in facts.items() if found.failure is None}
    out = {str(candidate): str(found.failure) for candidate, found in facts.items() if candidate not in timed}
    out |= {str(candidate): "; ".join(why) for candidate, why in reasons.items() if candidate not in timed}
    width = max(map(len, [*map(str, timed), *out]), default=0)
    lines = []
    if timed:
        titles = f"{'time':>9} {'hot':>9} {'pack':>9} {'GFLOP/s':>8} {'spread':>7} {'error':>8} {'workspace':>10}"
        lines += ["", f"  {'candidate':<{width}} {titles}"]
    for candidate in sorted(timed, key=lambda c: (rank.get(c, len(rank)), timed[c].time, str(c))):
        found = timed[candidate]
        against = reasons.get(candidate) or limits.why_not(found)
        columns = [
            f"{'>' if candidate == chosen else ' '} {candidate!s:<{width}}",
            f"{duration(found.time):>9}",
            f"{'-' if found.hot is None else duration(found.hot):>9}",
            f"{duration(found.pack):>9}",
            f"{layer.flops / found.time / 1e9:>8.1f}",
            f"{f'{found.spread:.1%}' if found.samples > 1 else '-':>7}",
            f"{found.error:>8.1e}",
            f"{size(limits.workspace(found)):>10}",
        ]
        lines.append(" ".join(columns) + (f"  out: {'; '.join(against)}" if against else ""))
    if out:
        lines += ["", "  out:"] + [f"  {name:<{width}} {why}" for name, why in sorted(out.items())]
    return lines
