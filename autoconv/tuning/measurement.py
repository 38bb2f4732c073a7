"""Build, verify and time candidates for one layer, in this process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from autoconv import registry
from autoconv.algorithm import Algorithm, Array, Candidate, Kernel
from autoconv.common.forks import compiled_aside
from autoconv.device import Device, Operands
from autoconv.errors import DeviceLostError, PlanError
from autoconv.layer import ConvLayer
from autoconv.records.failures import starved, unreached
from autoconv.records.schema import Facts
from autoconv.tuning.timing.contestant import Contestant, Timing
from autoconv.tuning.timing.full_speed import FullSpeed
from autoconv.tuning.timing.race import Heat
from autoconv.tuning.verification import Verifier, WrongResultError

PATIENCE = 15.0  # seconds in a race for waiting until the device is at full speed, or the budget if that is less
FEWEST_READY = 2  # candidates that are prepared, however long that takes: one alone is no choice


def longest_wait(budget: float | None) -> float:
    """Seconds for which a race waits at most until the device is at full speed."""
    return PATIENCE if budget is None else min(budget, PATIENCE)


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


class Measurement:
    """Candidates of one layer, built, verified and timed in this process, some at a time.

    What fails is recorded with the reason; nothing is raised for it.

    Parameters
    ----------
    layer, device
    budget : float, optional
        Seconds for the race. Verification is not cut short: an unverified candidate may not win.
    preparing : float, optional
        Seconds of building and verifying after which no further candidate is begun, once enough are ready; those left
        are unreached.
    fewest : int
        How many that is.
    progress : callable, optional
        Called with an `Event` before each step.
    aside : bool
        Whether processes forked from this one may compile ahead: only where no other thread minds.
    verifier : callable
        What gives the `Verifier` of a layer on a device.

    Raises
    ------
    PlanError
        When there is no memory to verify anything.
    """

    def __init__(
        self,
        layer: ConvLayer,
        device: Device,
        *,
        budget: float | None = None,
        preparing: float | None = None,
        fewest: int = FEWEST_READY,
        progress: Progress | None = None,
        aside: bool = False,
        verifier: Callable[[ConvLayer, Device], Verifier] = Verifier,
    ) -> None:
        self._layer, self._device, self._aside = layer, device, aside
        self._preparing, self._fewest = preparing, fewest
        self._tell = progress or (lambda event: None)
        self._algorithms = registry.by_name(device)
        self._failures: dict[Candidate, Facts] = {}
        self._contestants: dict[Candidate, Contestant] = {}
        self._workspace, self._room = device.buffer(1), 1
        self._heat = Heat(budget, on_event=self._on_event, ready=FullSpeed.of(device, longest_wait(budget)).wait)
        try:
            self._verifier = verifier(layer, device)
        except MemoryError as error:
            raise PlanError(f"not enough memory on {device.name} to verify {layer}: {error}") from None

    def enter(self, candidates: Sequence[Candidate]) -> dict[Candidate, Facts]:
        """Build and verify candidates, and give them a short timing.

        Parameters
        ----------
        candidates : sequence of Candidate
            Those whose `why_not` is empty.

        Returns
        -------
        dict of Candidate to Facts
            As far as is known until now.

        Raises
        ------
        DeviceLostError
            When a candidate left the device unusable, so that nothing can be said of the others.
        """
        device, total = self._device, len(self._contestants) + len(self._failures) + len(candidates)
        pairs = [(self._algorithms[candidate.algorithm], candidate.params) for candidate in candidates]
        device.get_ready_for(self._layer, pairs)
        fit = self._fit(candidates)
        builds = [functools.partial(algorithm.build, self._layer, device, params) for algorithm, params in pairs]
        ready, start = len(self._contestants) + self._fewest, time.perf_counter()
        with compiled_aside(builds, device.facts["threads"]) if self._aside else nullcontext():
            for done, candidate in enumerate(fit, len(self._contestants)):
                algorithm, spent = self._algorithms[candidate.algorithm], time.perf_counter() - start
                if self._preparing is not None and spent >= self._preparing and len(self._contestants) >= ready:
                    self._failures[candidate] = failed(algorithm, unreached(f"to prepare others took {spent:.2g} s"))
                    continue
                self._tell(Event("verify", self._layer, candidate, done, total))
                try:
                    contestant = _contestant(candidate, algorithm, self._verifier, self._workspace)
                    self._contestants[candidate] = contestant
                except Exception as failure:  # whatever a candidate does, it must not end the tuning
                    self._failures[candidate] = failed(algorithm, _failure(failure))
                    _insist_on(device)
        entrants = [self._contestants[candidate] for candidate in fit if candidate in self._contestants]
        facts = self._facts(self._heat.enter(entrants))
        return facts | {c: self._failures[c] for c in candidates if c in self._failures}

    def finish(self) -> dict[Candidate, Facts]:
        """Let those that may win race to the end.

        Returns
        -------
        dict of Candidate to Facts
            Of every candidate that has entered.

        Raises
        ------
        DeviceLostError
            As for `enter`.
        """
        facts = self._failures | self._facts(self._heat.finish())
        self._tell(Event("done", self._layer, None, len(facts), len(facts)))
        return facts

    def _fit(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose workspace is known, and of which the largest fits what there is: it serves all, one by one."""
        needs: dict[Candidate, int] = {}
        for candidate in candidates:
            algorithm = self._algorithms[candidate.algorithm]
            try:
                needs[candidate] = algorithm.workspace_bytes(self._layer, self._device, candidate.params)
            except Exception as failure:  # a library that it needs may be missing
                self._failures[candidate] = failed(algorithm, _failure(failure))
        for candidate in sorted(needs, key=needs.__getitem__, reverse=True):
            if (most := needs[candidate]) <= self._room:
                break
            try:
                self._workspace, self._room = self._device.buffer(most), most
            except MemoryError as failure:
                self._failures[candidate] = failed(self._algorithms[candidate.algorithm], _failure(failure))
                del needs[candidate]
        return list(needs)

    def _on_event(self, candidate: Candidate, finished: int, total: int) -> None:
        _insist_on(self._device)
        self._tell(Event("race", self._layer, candidate, finished, total))

    def _facts(self, timings: Mapping[Candidate, Timing | str]) -> dict[Candidate, Facts]:
        _insist_on(self._device)
        facts = {}
        for candidate, timing in timings.items():
            algorithm, contestant = self._algorithms[candidate.algorithm], self._contestants[candidate].retired()
            if isinstance(timing, str):
                facts[candidate] = failed(algorithm, timing)
            else:
                facts[candidate] = _timed(algorithm, contestant, timing)
            self._contestants[candidate] = contestant  # those that go on racing are held by the race
        return facts


def _failure(failure: Exception) -> str:
    """Why a candidate could not take part; too little memory says nothing of it, and it is tried again."""
    return starved(_reason(failure)) if isinstance(failure, MemoryError) else _reason(failure)


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
        dropped_by=None if timing.dropped_by is None else str(timing.dropped_by),
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


def _contestant(candidate: Candidate, algorithm: Algorithm[Any], verifier: Verifier, workspace: Array) -> Contestant:
    layer, device = verifier.layer, verifier.device
    kernel = algorithm.build(layer, device, candidate.params)
    weights, pack = verifier.b, None
    if kernel.packed_bytes:
        weights = device.buffer(kernel.packed_bytes)
        kernel.pack(verifier.b, weights)
        pack = device.stopwatch(lambda operands: kernel.pack(verifier.b, operands.b), _operands(verifier, weights)).hot
    error, same = verifier.check(kernel, weights)
    allowed = verifier.allowed(algorithm, candidate.params)
    if not error <= allowed:
        raise WrongResultError(f"wrong result: error {error:.1e}, allowed {allowed:.1e}")
    own = workspace[: kernel.workspace_bytes]  # of what serves all
    stopwatch = device.stopwatch(_launcher(kernel), _operands(verifier, weights, own))
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
        exact=algorithm.exact,
        keeps_denormals=algorithm.keeps_denormals,
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
