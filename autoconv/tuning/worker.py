"""Measuring in a worker process, which may crash or hang without taking anything down.

The worker is `python -m autoconv.tuning.worker`; requests and answers are lines of JSON over its standard
input and output. What it was doing when it died or overran is recorded as that candidate's failure,
a new worker is started, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.machine.recorded import put_in_force
from autoconv.device import Device
from autoconv.errors import DeviceLostError, PlanError
from autoconv.layer import ConvLayer
from autoconv.records.failures import killed, unreached
from autoconv.records.schema import Facts
from autoconv.tuning.measurement import FEWEST_READY, Event, Measurement, Progress, failed, longest_wait
from autoconv.tuning.process import OVERRAN, DeviceProcess, Message, NoAnswerError, serve
from autoconv.tuning.verification import Verifier, WrongResultError, reference_seconds

PATIENCE = 60.0  # seconds for one step (build and verify, or one round of timing) where no budget is given
SLACK = 20.0  # times what a right answer, or a run, is expected to take: it is checked, and others may be at work
KEPT = 16  # part of the memory which may stay taken between two races
LEAST_PATIENCE = 5.0  # however small the budget: compiling takes time; to begin, it has all of `PATIENCE`


class Worker:
    """Measures as `Measurement` does, in a process of its own for one device.

    Nothing that a candidate does can end the process that asks. What it was doing when it died or overran is that
    candidate's failure; a new process then measures the others anew.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self._process = DeviceProcess(device, "autoconv.tuning.worker")
        self._device = device
        self._machine: str | None = None  # the model that its process goes by
        self._begun = False

    def begin(
        self,
        layer: ConvLayer,
        *,
        budget: float | None = None,
        preparing: float | None = None,
        fewest: int = FEWEST_READY,
        progress: Progress | None = None,
    ) -> Self:
        """Turn to a layer.

        Parameters
        ----------
        layer, budget, preparing, fewest, progress
            As for `Measurement`. The budget is also the patience with one step, beside waiting for full speed; without
            one, a step of a huge layer may take as long as its candidate is expected to.

        Returns
        -------
        Worker
            Itself, of which `enter` and `finish` are asked next.
        """
        self._layer, self._progress = layer, progress
        self._algorithms = registry.by_name(self._device)
        machine = self._device.machine.text if isinstance(self._device, CPU) and self._device.model is None else None
        if machine != self._machine:  # by which kernels are cut: what a process has found by another one is stale
            self.close()
        self._machine = machine
        self._limits = {"budget": budget, "preparing": preparing, "fewest": fewest, "machine": machine}
        self._patience = PATIENCE if budget is None else max(budget, LEAST_PATIENCE) + longest_wait(budget)
        self._beginning = 0.0  # seconds until the right answer is found
        with contextlib.suppress(WrongResultError):  # where there is no right answer, the process says so
            self._beginning = SLACK * reference_seconds(layer, self._device)
        self._entered: list[Candidate] = []
        self._failures: dict[Candidate, Facts] = {}
        self._begun = False
        self._doing: Event | None = None
        return self

    def enter(self, candidates: Sequence[Candidate]) -> dict[Candidate, Facts]:
        """As `Measurement.enter`.

        Parameters
        ----------
        candidates : sequence of Candidate

        Returns
        -------
        dict of Candidate to Facts

        Raises
        ------
        PlanError
            When the worker cannot begin with any candidate: verification's own reference fails, say.
        """
        facts = self._answered(list(candidates))
        self._entered += facts
        return facts | {candidate: self._failures[candidate] for candidate in candidates if candidate not in facts}

    def finish(self) -> dict[Candidate, Facts]:
        """As `Measurement.finish`.

        Returns
        -------
        dict of Candidate to Facts

        Raises
        ------
        PlanError
            As for `enter`.
        """
        return self._failures | self._answered(None)

    def measure(
        self,
        layer: ConvLayer,
        candidates: Sequence[Candidate],
        *,
        budget: float | None = None,
        progress: Progress | None = None,
    ) -> dict[Candidate, Facts]:
        """The facts of candidates that are all measured at once, by `begin`, `enter` and `finish`, which see."""
        self.begin(layer, budget=budget, progress=progress).enter(candidates)
        return self.finish()

    def _answered(self, candidates: list[Candidate] | None) -> dict[Candidate, Facts]:
        """The facts of some candidates that enter, or with None of all in the end, but for those at which it fails."""
        while True:
            try:
                if not (self._begun and self._process.alive):  # it may have died between two questions
                    self._ask({"layer": self._layer.key()} | self._limits, self._beginning)
                    self._begun = True
                    self._ask({"enter": list(map(str, self._entered))})
                return self._ask({"finish": True} if candidates is None else {"enter": list(map(str, candidates))})
            except NoAnswerError as failure:
                self._begun = False
                culprit = _blamed(self._doing, failure)
                reason = killed() if failure.killed else str(failure)
                if reason.startswith(OVERRAN) and self._patience < PATIENCE:  # of a small budget
                    reason = unreached(reason)
                reason = f"{reason} ({_during(self._doing)})"
                self._failures[culprit] = failed(self._algorithms[culprit.algorithm], reason)
                for some in (self._entered, candidates or []):
                    if culprit in some:
                        some.remove(culprit)
            except BaseException:  # its answer, if one is still to come, would be taken for that to the next request
                self.close()
                raise

    def _ask(self, message: Message, beginning: float = 0.0) -> dict[Candidate, Facts]:
        """The answer to one message, whose first sign of life may take as long as `beginning`, or as usual."""
        self._doing = None
        self._process.send(message)
        while True:
            # at first it has to import all and to find the right answer, or to compile
            first = max(self._patience, PATIENCE, beginning)
            answer = self._process.receive(self._step() if self._doing else first)
            if "facts" in answer:
                return {Candidate.parse(name): Facts(**fields) for name, fields in answer["facts"].items()}
            if "error" in answer:
                raise PlanError(f"{self._layer} cannot be measured: {answer['error']}")
            candidate = None if answer["candidate"] is None else Candidate.parse(answer["candidate"])
            self._doing = Event(answer["stage"], self._layer, candidate, answer["done"], answer["total"])
            if self._progress is not None:
                self._progress(self._doing)

    def _step(self) -> float:
        """Seconds for what is being done: a budget alone bounds how often a slow candidate runs."""
        candidate = self._doing.candidate if self._doing else None
        if candidate is None or self._limits["budget"] is not None:
            return self._patience
        seconds = self._algorithms[candidate.algorithm].estimate(self._layer, self._device, candidate.params)
        return max(self._patience, SLACK * seconds)

    def close(self) -> None:
        """End the process, whatever it is doing; the next `begin` starts another."""
        self._process.close()
        self._begun = False


def _blamed(doing: Event | None, failure: NoAnswerError) -> Candidate:
    if doing is None or doing.candidate is None:
        raise PlanError(f"the tuning worker ended before it began with any candidate: {failure}") from None
    return doing.candidate


def _during(doing: Event | None) -> str:
    return "nothing begun" if doing is None else {"verify": "being verified", "race": "being timed"}[doing.stage]


class _Answers:
    """The worker's side: progress, and then the facts, or why there are none."""

    def __init__(self) -> None:
        self._measurement: Measurement | None = None
        self._last: Verifier | None = None  # a layer is often raced several times: right answers take seconds

    def __call__(self, device: Device, request: Message, answer: Callable[[Message], None]) -> None:
        def progress(event: Event) -> None:
            candidate = None if event.candidate is None else str(event.candidate)
            answer({"stage": event.stage, "candidate": candidate, "done": event.done, "total": event.total})

        try:
            with device.selected():
                facts = self._found(device, request, progress)
        except DeviceLostError:
            raise
        except Exception as failure:
            answer({"error": f"{type(failure).__name__}: {failure}"})
        else:
            answer({"facts": {str(candidate): dataclasses.asdict(found) for candidate, found in facts.items()}})

    def _found(self, device: Device, request: Message, progress: Progress) -> dict[Candidate, Facts]:
        if "layer" in request:
            self._measurement = None  # what the last one held is free
            if (machine := request.get("machine")) is not None:
                put_in_force(device.key, Machine.parse(machine))
            layer, aside = ConvLayer.parse(request["layer"]), isinstance(device, CPU)
            limits = {name: request[name] for name in ("budget", "preparing", "fewest")}
            self._measurement = Measurement(
                layer, device, **limits, progress=progress, aside=aside, verifier=self._verifier
            )
            return {}
        assert self._measurement is not None
        if "enter" in request:
            return self._measurement.enter(list(map(Candidate.parse, request["enter"])))
        measurement, self._measurement = self._measurement, None  # the next layer may be long in coming
        facts = measurement.finish()
        if self._last is not None and self._last.rest() > device.memory_available() // KEPT:
            self._last = None
        return facts

    def _verifier(self, layer: ConvLayer, device: Device) -> Verifier:
        """A new one, unless the last race was of the same layer."""
        if self._last is None or self._last.layer != layer:
            self._last = None  # before another takes memory
            self._last = Verifier(layer, device)
        return self._last


if __name__ == "__main__":
    serve(_Answers())
