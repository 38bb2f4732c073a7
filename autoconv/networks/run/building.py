"""Building the kernels of a network's layers: where that takes long, other processes compile some of them meanwhile.

Threads would not do, as llvmlite calls LLVM behind one lock. What another process compiles, this one finds in the
folder of compiled kernels.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from autoconv import registry
from autoconv.algorithm import Candidate, Kernel
from autoconv.cpu.common.correlation import pitched, pitches
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.machine.recorded import put_in_force
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.tuning.process import DeviceProcess, Message, serve

WORTH = 2.0  # seconds that all that is left would take this process alone: another takes half of one to start
MOST = 8  # other processes, each of which takes a tenth of a gigabyte


class Build(NamedTuple):
    """A kernel to build: a plan's, for its layer or one whose arrays lie elsewhere in memory."""

    plan: Plan
    layer: ConvLayer

    def __call__(self) -> Kernel:
        return self.plan.kernel if self.layer == self.plan.layer else self.plan.kernel_of(self.layer)

    @property
    def text(self) -> tuple[str, int, int, str]:
        """The same for another process."""
        return self.layer.key(), *pitches(self.layer), str(self.plan.candidate)


def built(builds: Sequence[Build], device: Device, worth: float = WORTH) -> list[Kernel]:
    """The kernels, in order.

    On a CPU as many processes as it has threads, up to `MOST` beside this one, compile as soon as what is left is seen
    to take long. Others begin at the end: where they and this one meet, a kernel may be compiled twice.

    Parameters
    ----------
    builds : sequence of Build
    device : Device
    worth : float
        How many seconds are long.

    Returns
    -------
    list of Kernel
    """
    begun, helpers, kernels = time.perf_counter(), list[DeviceProcess](), list[Kernel]()
    most = min(device.threads - 1, MOST) if isinstance(device, CPU) and _is_python(sys.executable) else 0
    try:
        for done, build in enumerate(builds):
            left = len(builds) - done
            if most and done and (time.perf_counter() - begun) / done * left > worth:
                helpers, most = _helpers(device, builds[:done:-1], most), 0
            kernels.append(build())
    finally:
        for helper in helpers:
            helper.close()
    return kernels


def _is_python(executable: str | None) -> bool:
    """Whether a program is an interpreter: one that has Python built in would start once more as what it is."""
    name = Path(executable or "").stem.lower()
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _helpers(device: Device, builds: Sequence[Build], most: int) -> list[DeviceProcess]:
    """Processes that compile, each its part; none where none can be started."""
    assert isinstance(device, CPU)
    texts = list(dict.fromkeys(build.text for build in builds))
    helpers = [DeviceProcess(device, "autoconv.networks.run.building") for _ in range(min(most, len(texts)))]
    machine = device.machine.text if device.model is None else None
    with contextlib.suppress(PlanError):
        for place, helper in enumerate(helpers):
            helper.send({"machine": machine, "builds": texts[place :: len(helpers)]})
    return helpers


def _build(device: Device, message: Message, answer: Callable[[Message], None]) -> None:
    """What such a process does; what fails is left for the other to meet."""
    if message["machine"] is not None:
        put_in_force(device.key, Machine.parse(message["machine"]))
    algorithms = registry.by_name(device)
    for key, *pitch, text in message["builds"]:
        layer, candidate = pitched(ConvLayer.parse(key), *pitch), Candidate.parse(text)
        with contextlib.suppress(Exception):
            algorithms[candidate.algorithm].build(layer, device, candidate.params)
    answer({"built": len(message["builds"])})


if __name__ == "__main__":
    serve(_build)
