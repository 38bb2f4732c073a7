"""A runtime in a process of its own: what it loads, what it answers, how long it takes, and how much memory."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.bench.networks.runtimes import AUTOCONV, RUNTIMES, Loaded
from autoconv.bench.race import sample
from autoconv.bench.suites import OURS
from autoconv.common.text import one_line
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.tuning.process import DeviceProcess, Message, serve
from autoconv.tuning.timing.race import wait_until_idle

PATIENCE = 600.0  # seconds for loading a network, which some do by compiling C++; or for a sample


class RuntimeProcess:
    """A runtime with a network, in another process.

    Parameters
    ----------
    name : str
        Of `RUNTIMES`, or autoconv.
    device : CPU
        With as many threads as it is to compute on.
    """

    def __init__(self, name: str, device: CPU) -> None:
        self.name = name
        self._process = DeviceProcess(device, "autoconv.bench.networks.process")

    def load(self, model: Path, folder: Path) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Read a network of static shapes, and run it once.

        Parameters
        ----------
        model : Path
        folder : Path
            Where `inputs.npz` has the names of the inputs, and then these; the outputs are left there, too.

        Returns
        -------
        outputs : list of array
        facts : dict
            `seconds` until it was loaded, `memory`: the bytes that the first runs took beyond those of the loaded
            network, None where the system does not tell; and what the runtime says of itself.

        Raises
        ------
        PlanError
            When the runtime cannot.
        NoAnswerError
            When its process died.
        """
        facts = self._answer({"load": self.name, "model": str(model), "folder": str(folder)})
        with np.load(folder / f"{self.name}.npz") as found:
            return [found[name] for name in found.files], facts

    def sample(self) -> float:
        """Median seconds of some runs, after which its threads are asleep.

        Returns
        -------
        float

        Raises
        ------
        PlanError, NoAnswerError
            As for `load`.
        """
        return float(self._answer({"sample": True})["seconds"])

    def _answer(self, message: Message) -> Message:
        self._process.send(message)
        found = self._process.receive(PATIENCE)
        if "error" in found:
            raise PlanError(found["error"])
        return found

    def close(self) -> None:
        """End the process."""
        self._process.close()


class _Answers:
    """The other end."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None
        self._inputs: dict[str, np.ndarray] = {}  # whose memory some libraries read in every run, and do not keep

    def __call__(self, device: Device, message: Message, answer: Any) -> None:
        try:
            answer(self._load(device, message) if "load" in message else self._sample())
        except Exception as failure:  # whatever a library raises is for its parent to tell
            answer({"error": one_line(failure, 200)})

    def _load(self, device: Device, message: Message) -> Message:
        assert isinstance(device, CPU)
        runtime = AUTOCONV if message["load"] == OURS else RUNTIMES[message["load"]]
        folder = Path(message["folder"])
        with np.load(folder / "inputs.npz") as stored:
            names, *arrays = (stored[name] for name in stored.files)
        self._inputs = inputs = dict(zip(names.tolist(), arrays, strict=True))
        start = time.perf_counter()
        loaded = runtime.load(Path(message["model"]), inputs, device)
        seconds = time.perf_counter() - start
        before, forgotten = _memory("VmRSS"), _forget_peak()
        found = loaded.run()
        outputs = [np.array(y) for y in loaded.read(found)]
        loaded.run()
        after = _memory("VmHWM")
        np.savez(folder / f"{message['load']}.npz", *outputs)
        self._loaded = loaded
        memory = after - before if forgotten and before is not None and after is not None else None
        return {"seconds": seconds, "memory": memory, **loaded.facts}

    def _sample(self) -> Message:
        assert self._loaded is not None
        wait_until_idle()
        seconds = sample(self._loaded.run, time.perf_counter)
        wait_until_idle()
        return {"seconds": seconds}


def _memory(field: str) -> int | None:
    """Bytes that the system counts for this process; None where it does not say."""
    if field == "VmRSS":
        with contextlib.suppress(AttributeError, TypeError):  # of glibc alone
            ctypes.CDLL(None).malloc_trim(0)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return None


def _forget_peak() -> bool:
    """Let the peak be what is used now; whether the system does so."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    serve(_Answers())
