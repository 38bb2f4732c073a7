"""Build, verify and time candidates for one layer, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate, Kernel
from autoconv.device import Device, Operands
from autoconv.errors import DeviceLostError, PlanError
from autoconv.layer import ConvLayer
from autoconv.records.schema import STARVED, Facts
from autoconv.tuning.race import Contestant, Timing, race
from autoconv.tuning.verification import Verifier, WrongResultError

Stage = Literal["wait", "verify", "race", "done"]


@dataclass(frozen=True)
class Event:
    """What the tuner is doing: `done` of `total` candidates through this stage.

    Attributes
    ----------
    stage : "wait", "verify", "race" or "done"
        It waits while another process, or thread, is timing on the device.
    layer : ConvLayer
    candidate : Candidate or None
        Whose turn it is; prints as its name.
    done, total : int
    """

    stage: Stage
    layer: ConvLayer
    candidate: Candidate | None
    done: int
    total: int


Progress = Callable[[Event], None]


def measure(
    layer: ConvLayer,
    device: Device,
    candidates: Sequence[Candidate],
    *,
    budget: float | None = None,
    progress: Progress | None = None,
) -> dict[Candidate, Facts]:
    """Every candidate's facts. What fails is recorded with the reason; nothing is raised for it.

    Parameters
    ----------
    layer, device
    candidates : sequence of Candidate
        Those whose `why_not` is empty.
    budget : float, optional
        Seconds for the race. Verification is not cut short: an unverified candidate may not win.
    progress : callable, optional
        Called with an `Event` before each step.

    Returns
    -------
    dict of Candidate to Facts

    Raises
    ------
    DeviceLostError
        When a candidate left the device unusable, so that nothing can be said of the others.
    PlanError
        When there is no memory to verify anything.
    """
    tell = progress or (lambda event: None)
    algorithms = {algorithm.name: algorithm for algorithm in registry.algorithms(device)}
    device.prepare(layer, [(algorithms[candidate.algorithm], candidate.params) for candidate in candidates])
    try:
        verifier = Verifier(layer, device)
    except MemoryError as error:
        raise PlanError(f"not enough memory on {device.name} to verify {layer}: {error}") from None
    facts: dict[Candidate, Facts] = {}
    contestants: dict[Candidate, Contestant] = {}
    needs: dict[Candidate, int] = {}
    for candidate in candidates:
        algorithm = algorithms[candidate.algorithm]
        try:
            needs[candidate] = algorithm.workspace_bytes(layer, device, candidate.params)
        except Exception as failure:  # a library that it needs may be missing
            facts[candidate] = failed(algorithm, _failure(failure))
    workspace = device.buffer(max([1, *needs.values()]))  # one serves all: they run one after the other
    for done, candidate in enumerate(needs):
        algorithm = algorithms[candidate.algorithm]
        tell(Event("verify", layer, candidate, done, len(candidates)))
        try:
            contestants[candidate] = _contestant(candidate, algorithm, verifier, workspace)
        except Exception as failure:  # whatever a candidate does, it must not end the tuning
            facts[candidate] = failed(algorithm, _failure(failure))
            _insist_on(device)

    def on_event(candidate: Candidate, finished: int, total: int) -> None:
        _insist_on(device)
        tell(Event("race", layer, candidate, finished, total))

    timings = race(list(contestants.values()), budget=budget, on_event=on_event)
    _insist_on(device)
    for candidate, timing in timings.items():
        algorithm = algorithms[candidate.algorithm]
        if isinstance(timing, str):
            facts[candidate] = failed(algorithm, timing)
        else:
            facts[candidate] = _timed(algorithm, contestants[candidate], timing)
    tell(Event("done", layer, None, len(candidates), len(candidates)))
    return facts


def _failure(failure: Exception) -> str:
    """Why a candidate could not take part; too little memory says nothing of it, and it is tried again."""
    return f"{STARVED}: {_reason(failure)}" if isinstance(failure, MemoryError) else _reason(failure)


def failed(algorithm: Algorithm[Any], reason: str) -> Facts:
    """The facts of a candidate that could not take part."""
    return Facts(version=algorithm.version, failure=reason, vendor=algorithm.vendor)


def _timed(algorithm: Algorithm[Any], entrant: Contestant, timing: Timing) -> Facts:
    return Facts(
        version=algorithm.version,
        time=timing.time,
        hot=timing.hot,
        pack=timing.pack,
        spread=timing.spread,
        samples=timing.samples,
        workspace=entrant.workspace,
        packed=entrant.packed,
        error=entrant.error,
        deterministic=entrant.deterministic,
        tf32=entrant.tf32,
        vendor=algorithm.vendor,
    )


def _insist_on(device: Device) -> None:
    """A fault of one candidate must not be taken for one of all that follow."""
    if reason := device.lost():
        raise DeviceLostError(
            f"{device.name} is lost to this process ({reason}): start another one; what is on record is intact"
        )


def _reason(failure: Exception) -> str:
    text = " ".join(str(failure).split()) or type(failure).__name__
    kind = "" if isinstance(failure, WrongResultError) else f"{type(failure).__name__}: "
    return f"{kind}{text}"[:300]


def _contestant(candidate: Candidate, algorithm: Algorithm[Any], verifier: Verifier, workspace: object) -> Contestant:
    layer, device = verifier.layer, verifier.device
    kernel = algorithm.build(layer, device, candidate.params)
    weights, pack = verifier.b, None
    if kernel.packed_bytes:
        weights = device.buffer(kernel.packed_bytes)
        kernel.pack(verifier.b, weights)
        pack = device.stopwatch(lambda operands: kernel.pack(verifier.b, operands.b), _operands(verifier, weights)).hot
    error, same = verifier.check(kernel, weights)
    bound = algorithm.bound(layer, candidate.params)
    bound += algorithm.absolute_bound(layer, candidate.params) / verifier.magnitude  # of operands of at most 1
    if not error <= bound:
        raise WrongResultError(f"wrong result: error {error:.1e}, allowed {bound:.1e}")
    stopwatch = device.stopwatch(_launcher(kernel), _operands(verifier, weights, workspace))
    return Contestant(
        candidate=candidate,
        cold=stopwatch.cold,
        hot=stopwatch.hot,
        pack=pack,
        workspace=kernel.workspace_bytes,
        packed=kernel.packed_bytes,
        error=error,
        deterministic=algorithm.deterministic and same,
        tf32=algorithm.tf32,
        pool=algorithm.pool,
        vendor=algorithm.vendor,
    )


def _launcher(kernel: Kernel) -> Callable[[Operands], None]:
    def launch(o: Operands) -> None:
        kernel.run(o.a, o.b, o.out, o.bias, o.residual, o.workspace)

    return launch


def _operands(verifier: Verifier, weights: object, workspace: object = None) -> Operands:
    return Operands(
        verifier.a, weights, verifier.out, verifier.bias, verifier.residual, workspace, copies=verifier.copies
    )
