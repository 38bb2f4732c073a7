"""Another process that works on a device, which may crash or hang without taking anything down.

`DeviceProcess` is the end of the one who asks, `serve` the other; messages are lines of JSON over standard input and
output.
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
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from autoconv.common.text import reason
from autoconv.device import Device
from autoconv.errors import DeviceLostError, PlanError

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
        """Send a message, to a new process where there is none. One that dies of it is noticed by `receive`.

        Raises
        ------
        PlanError
            When no process can be started.
        """
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
        patience = min(patience, threading.TIMEOUT_MAX)
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
            words, killed = self._last_words(), self._process.wait() == -signal.SIGKILL
            self.close()
            raise NoAnswerError(words, killed=killed)
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
        try:
            self._start_new()
        except (OSError, RuntimeError) as error:  # no more processes, files or threads
            self.close()
            if self._errors is not None:
                self._errors.close()
            raise PlanError(f"the worker process {self.module} cannot be started: {reason(error)}") from None
        self._write(opening(self.device))

    def _start_new(self) -> None:
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
