"""Measuring in a worker process, which may crash or hang without taking anything down.

The worker is `python -m autoconv.tuning.worker`; requests and answers are lines of JSON over its standard
input and output. What it was doing when it died or overran is recorded as that candidate's failure,
a new worker is started, and the rest goes on. `DeviceProcess` and `serve` are the two ends of any such process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Self, cast

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import DeviceLostError, PlanError
from autoconv.layer import ConvLayer
from autoconv.records.schema import STARVED, Facts
from autoconv.tuning.measurement import Event, Measurement, Progress, failed, longest_wait

PATIENCE = 60.0  # seconds for one step (build and verify, or one round of timing) where no budget is given
LEAST_PATIENCE = 5.0  # however small the budget: compiling takes time; to begin, it has all of `PATIENCE`
OVERSLEPT = 0.2  # seconds by which a wait is longer only when this process was stopped: then the other was, too
OVERRAN = "overran"  # how a failure begins of one that was waited for in vain
LOST = 70  # exit status of a process whose device is lost

Message = dict[str, Any]


class NoAnswerError(Exception):
    """A process died, or gave no sign of life for as long as it was waited for; it has been ended.

    Attributes
    ----------
    killed : bool
        Whether the system ended it, which does so for want of memory: no process sends itself SIGKILL.
    """

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed


class DeviceProcess:
    """Another process that works on a device: a message there, messages back, in plain JSON types.

    It is started when something is sent, and again after it has ended. The module's `__main__` is to call `serve`.

    Parameters
    ----------
    device : Device
        Opened there as well.
    module : str
        What the process runs.
    environment : dict
        Environment variables that it has and this one need not.
    """

    def __init__(self, device: Device, module: str, environment: Mapping[str, str] | None = None) -> None:
        self.device, self.module, self.environment = device, module, dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()  # a child that was forked leaves its parent's process alone
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: Any = None
        atexit.register(self.close)

    def send(self, message: Message) -> None:
        """Send a message, to a new process where there is none. One that dies of it is noticed by `receive`."""
        if not self.alive:
            self._start()
        self._write(message)

    def receive(self, patience: float) -> Message:
        """The next message.

        Parameters
        ----------
        patience : float
            Seconds to wait for it.

        Raises
        ------
        NoAnswerError
            When the process died, or sent nothing in that time. It is ended then, and the next `send` starts another.
        """
        while True:
            begin = time.monotonic()
            try:
                line = self._lines.get(timeout=patience)
                break
            except queue.Empty:
                if time.monotonic() - begin < patience + OVERSLEPT:
                    self.close()
                    raise NoAnswerError(f"{OVERRAN}: no sign of life for {patience:g} s") from None
        if line is None:
            assert self._process is not None
            reason, killed = self._last_words(), self._process.wait() == -signal.SIGKILL
            self.close()
            raise NoAnswerError(reason, killed=killed)
        return dict(json.loads(line))

    @property
    def alive(self) -> bool:
        """Whether there is a process of this one's that has not ended."""
        return self._process is not None and self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None and self._owner != os.getpid():
            self._process = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # with those that it has forked, which hold its pipes
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                with contextlib.suppress(OSError):
                    cast(IO[str], pipe).close()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._owner = os.getpid()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.module],  # -P: what lies in the working directory is none of its modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            errors="replace",  # a library may print anything while it is imported
            env=inherited() | self.environment,
            start_new_session=True,
        )
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        self._write(opening(self.device))

    def _write(self, message: Message) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that died is noticed when its answer is read
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _last_words(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read()[-4000:].splitlines() if line.strip()]
        how = f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with status {code}"
        return how + (f": {lines[-1][:200]}" if lines and code >= 0 else "")


def inherited() -> dict[str, str]:
    """The environment of a process that finds the modules which this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(path) or os.curdir for path in sys.path)}


def opening(device: Device) -> Message:
    """The first message to a process that calls `serve`: which device it is to work on."""
    kind = type(device)
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": dataclasses.asdict(device)}  # type: ignore[call-overload]


def _read(pipe: Any, lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under us
        for line in pipe:
            if line.startswith("{"):  # a library may print while it is imported
                lines.put(line)
    lines.put(None)


def serve(handle: Callable[[Device, Message, Callable[[Message], None]], None]) -> None:
    """The other end of a `DeviceProcess`: one device, then message after message until the input ends.

    Parameters
    ----------
    handle : callable
        Called as `handle(device, message, answer)`; sends what it finds by `answer(message)`. A `DeviceLostError` ends
        the process: a new one can go on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer

    def answer(message: Message) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    first = json.loads(sys.stdin.readline())
    module, _, name = first["class"].partition(":")
    device: Device = getattr(importlib.import_module(module), name)(**first["fields"])
    for line in sys.stdin:
        try:
            handle(device, json.loads(line), answer)
        except DeviceLostError as failure:
            sys.stderr.write(f"{failure}\n")
            sys.stderr.flush()
            os._exit(LOST)


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
        self._algorithms = {algorithm.name: algorithm for algorithm in registry.algorithms(device)}
        self._begun = False

    def begin(
        self,
        layer: ConvLayer,
        *,
        budget: float | None = None,
        preparing: float | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Turn to a layer.

        Parameters
        ----------
        layer, budget, preparing, progress
            As for `Measurement`. The budget is also the patience with one step, beside waiting for full speed.

        Returns
        -------
        Worker
            Itself, of which `enter` and `finish` are asked next.
        """
        self._layer, self._progress = layer, progress
        self._limits = {"budget": budget, "preparing": preparing}
        self._patience = PATIENCE if budget is None else max(budget, LEAST_PATIENCE) + longest_wait(budget)
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
                    self._ask({"layer": self._layer.key()} | self._limits)
                    self._begun = True
                    self._ask({"enter": list(map(str, self._entered))})
                return self._ask({"finish": True} if candidates is None else {"enter": list(map(str, candidates))})
            except NoAnswerError as failure:
                self._begun = False
                culprit = _blamed(self._doing, failure)
                reason = f"{STARVED}: the worker {failure}" if failure.killed else str(failure)
                if reason.startswith(OVERRAN) and self._patience < PATIENCE:  # of a small budget
                    reason = f"unreached: {reason}"
                reason = f"{reason} ({_during(self._doing)})"
                self._failures[culprit] = failed(self._algorithms[culprit.algorithm], reason)
                for some in (self._entered, candidates or []):
                    if culprit in some:
                        some.remove(culprit)
            except BaseException:  # its answer, if one is still to come, would be taken for that to the next request
                self.close()
                raise

    def _ask(self, message: Message) -> dict[Candidate, Facts]:
        """The answer to one message."""
        self._doing = None
        self._process.send(message)
        while True:
            # at first it has to import all and to find the right answer, or to compile
            answer = self._process.receive(self._patience if self._doing else max(self._patience, PATIENCE))
            if "facts" in answer:
                return {Candidate.parse(name): Facts(**fields) for name, fields in answer["facts"].items()}
            if "error" in answer:
                raise PlanError(f"{self._layer} cannot be measured: {answer['error']}")
            candidate = None if answer["candidate"] is None else Candidate.parse(answer["candidate"])
            self._doing = Event(answer["stage"], self._layer, candidate, answer["done"], answer["total"])
            if self._progress is not None:
                self._progress(self._doing)

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
            layer, aside = ConvLayer.parse(request["layer"]), isinstance(device, CPU)
            self._measurement = Measurement(
                layer, device, budget=request["budget"], preparing=request["preparing"], progress=progress, aside=aside
            )
            return {}
        assert self._measurement is not None
        if "enter" in request:
            return self._measurement.enter(list(map(Candidate.parse, request["enter"])))
        return self._measurement.finish()


if __name__ == "__main__":
    serve(_Answers())
