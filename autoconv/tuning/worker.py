"""Measuring in a worker process, which may crash or hang without taking anything down.

The worker is `python -m autoconv.tuning.worker`; requests and answers are lines of JSON over its standard
input and output. What it was doing when it died or overran is recorded as that candidate's failure,
a new worker is started, and the rest goes on.
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
from collections.abc import Sequence
from typing import IO, Any, cast

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.device import Device
from autoconv.errors import DeviceLostError, PlanError
from autoconv.layer import ConvLayer
from autoconv.records.schema import Facts
from autoconv.tuning.measurement import Event, Progress, failed, measure

PATIENCE = 60.0  # seconds for one step (build and verify, or one round of timing) where no budget is given
LOST = 70  # exit status of a worker whose device is lost
LEAST_PATIENCE = 5.0  # however small the budget: compiling takes time; to begin, it has all of `PATIENCE`


class Worker:
    """A worker process for one device, started when needed and again after a crash."""

    module = "autoconv.tuning.worker"

    def __init__(self, device: Device) -> None:
        self.device = device
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: Any = None
        atexit.register(self.close)

    def measure(
        self,
        layer: ConvLayer,
        candidates: Sequence[Candidate],
        *,
        budget: float | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Facts]:
        """As `autoconv.tuning.measurement.measure`, but nothing a candidate does can end this process.

        Raises
        ------
        PlanError
            When the worker cannot begin with any candidate: verification's own reference fails, say.
        """
        left = list(candidates)
        failures: dict[str, Facts] = {}
        algorithms = {algorithm.name: algorithm for algorithm in registry.algorithms(self.device)}
        patience = PATIENCE if budget is None else max(budget, LEAST_PATIENCE)
        while True:
            try:
                facts, culprit, reason = self._attempt(layer, left, budget, progress, patience)
            except BaseException:  # its answer, if one is still to come, would be taken for that to the next request
                self.close()
                raise
            if culprit is None:
                return failures | facts
            failures[culprit] = failed(algorithms[Candidate.parse(culprit).algorithm], reason)
            left = [candidate for candidate in left if str(candidate) != culprit]

    def _attempt(
        self,
        layer: ConvLayer,
        candidates: Sequence[Candidate],
        budget: float | None,
        progress: Progress | None,
        patience: float,
    ) -> tuple[dict[str, Facts], str | None, str]:
        """The facts; or the candidate at which the worker died or overran, and how."""
        self._start()
        self._send({"layer": layer.key(), "candidates": [str(c) for c in candidates], "budget": budget})
        doing: Event | None = None
        while True:
            wait = patience if doing else max(patience, PATIENCE)  # to import all, and to find the right answer
            try:
                line = self._lines.get(timeout=wait)
            except queue.Empty:
                self.close()
                return {}, _blame(doing), f"overran: no sign of life for {wait:g} s ({_during(doing)})"
            if line is None:
                return {}, _blame(doing), f"{self._last_words()} ({_during(doing)})"
            answer = json.loads(line)
            if "facts" in answer:
                return {name: Facts(**fields) for name, fields in answer["facts"].items()}, None, ""
            if "error" in answer:
                raise PlanError(f"{layer} cannot be measured: {answer['error']}")
            doing = Event(answer["stage"], layer, answer["candidate"], answer["done"], answer["total"])
            if progress is not None:
                progress(doing)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.module],  # -P: what lies in the working directory is none of its modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            errors="replace",  # a library may print anything while it is imported
            env=os.environ | {"PYTHONPATH": os.pathsep.join(str(path) or os.curdir for path in sys.path)},
        )
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        kind = type(self.device)
        self._send({"class": f"{kind.__module__}:{kind.__qualname__}", "fields": dataclasses.asdict(self.device)})  # type: ignore[call-overload]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a worker that died is noticed when its answer is read
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _last_words(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read()[-4000:].splitlines() if line.strip()]
        how = f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with status {code}"
        return how + (f": {lines[-1][:200]}" if lines and code >= 0 else "")

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                with contextlib.suppress(OSError):
                    cast(IO[str], pipe).close()
            self._process = None


def _blame(doing: Event | None) -> str | None:
    if doing is None or doing.candidate is None:
        raise PlanError("the tuning worker ended before it began with any candidate")
    return doing.candidate


def _during(doing: Event | None) -> str:
    return "nothing begun" if doing is None else {"verify": "being verified", "race": "being timed"}[doing.stage]


def _read(pipe: Any, lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under us
        for line in pipe:
            if line.startswith("{"):  # a library may print while it is imported
                lines.put(line)
    lines.put(None)


def _serve() -> None:
    """The worker's side: one device, then request after request until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    opening = json.loads(sys.stdin.readline())
    module, _, name = opening["class"].partition(":")
    device: Device = getattr(importlib.import_module(module), name)(**opening["fields"])

    def progress(event: Event) -> None:
        answer({"stage": event.stage, "candidate": event.candidate, "done": event.done, "total": event.total})

    for line in sys.stdin:
        request = json.loads(line)
        try:
            with device.selected():
                facts = measure(
                    ConvLayer.parse(request["layer"]),
                    device,
                    [Candidate.parse(text) for text in request["candidates"]],
                    budget=request["budget"],
                    progress=progress,
                )
            answer({"facts": {name: dataclasses.asdict(found) for name, found in facts.items()}})
        except DeviceLostError as failure:  # a new process can go on
            sys.stderr.write(f"{failure}\n")
            sys.stderr.flush()
            os._exit(LOST)
        except Exception as failure:
            answer({"error": f"{type(failure).__name__}: {failure}"})


if __name__ == "__main__":
    _serve()
