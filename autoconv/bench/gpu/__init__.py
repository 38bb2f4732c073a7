"""Everything that needs a GPU, in one command that may be interrupted: `autoconv bench --device cuda`.

The work is a list of items, the most valuable first (`agenda`); each is done by a helper process and its result is one
line of JSON in `results.jsonl`. An item whose helper dies, hangs, or loses the device is a line too, and the
next one gets a new helper. The same command goes on where the lines end, on another machine too (`archive`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoconv import registry
from autoconv.bench import lines
from autoconv.bench.gpu.agenda import Target, announced, items, timetable
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.tuning.worker import OVERRAN, DeviceProcess, NoAnswerError

RESULTS = "results.jsonl"
CACHES = {"AUTOCONV_KERNEL_DIR": "kernels", "CUPY_CACHE_DIR": "cupy"}  # of compiled kernels: ours, and CuPy's own
PATIENCE = 180.0  # seconds without a sign of life from a helper
GRACE = 15.0  # seconds that an item may still take when the budget is spent

Result = dict[str, Any]
Say = Callable[[str], None]


class Helper(DeviceProcess):
    """A process that does one item after the other, and keeps what it compiles beside its results."""

    def __init__(self, device: Device, folder: Path) -> None:
        caches = {name: str(folder.absolute() / part) for name, part in CACHES.items()}
        super().__init__(device, "autoconv.bench.gpu.helper", caches)
        self.folder = folder

    def ask(self, item: str, patience: float) -> Result:
        """The item's result; why there is none is one too."""
        self.send({"item": item, "folder": str(self.folder)})
        try:
            answer = self.receive(patience)
        except NoAnswerError as failure:
            return {"failure": str(failure)}
        if "lost" in answer:  # its process is about to end
            self.close()
        return answer


def read(folder: Path) -> list[Result]:
    """The results so far."""
    return [one for one in lines.read(folder / RESULTS) if isinstance(one, dict) and isinstance(one.get("item"), str)]


def settled(results: Sequence[Result], code: str) -> set[str]:
    """Items that need not be done again: what failed with other kernels than today's may go well now."""
    return {result["item"] for result in results if "failure" not in result or result.get("code") == code}


def run(
    device: Device,
    folder: Path,
    phases: Sequence[str],
    budget: float,
    wanted: Sequence[Target],
    *,
    say: Say = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Result], int]:
    """Do what is not done yet, until the budget in seconds is spent; all results, and how many items are left.

    Raises
    ------
    PlanError
        When the folder holds the results of another device.
    """
    start = clock()
    folder.mkdir(parents=True, exist_ok=True)
    results, algorithms = read(folder), registry.algorithms(device)
    code = registry.code_of(algorithms)
    helper = Helper(device, folder)
    with lines.adding(folder / RESULTS) as add:

        def do(item: str, patience: float) -> Result:
            say(item)
            began = clock()
            result: Result = {"item": item, "code": code} | helper.ask(item, patience)
            if patience < PATIENCE and OVERRAN in result.get("failure", ""):
                return result  # the budget ended before the item did, which is still to be done
            result["seconds"] = round(clock() - began, 3)
            add(result)
            results.append(result)
            return result

        try:
            before = [r["key"] for r in results if r["item"] == "machine" and "key" in r]
            machine = do("machine", PATIENCE)
            if "failure" in machine:
                raise PlanError(f"the device does not answer: {machine['failure']}")
            if before and machine["key"] != before[0]:
                raise PlanError(f"{folder} holds results of {before[0]}, this is {machine['key']}: use another folder")
            done = settled(results, code)
            left = [item for item in items(phases, algorithms, wanted) if item not in done]
            while left and (seconds := budget - (clock() - start)) > 0:
                if do(left[0], min(PATIENCE, seconds + GRACE)) in results:
                    del left[0]
        finally:
            helper.close()
    return results, len(left)


def preview(folder: Path, phases: Sequence[str], budget: float, wanted: Sequence[Target]) -> list[str]:
    """What `run` would do, as lines: each item, when it should be done, and what is compared within the budget."""
    algorithms, results = registry.algorithms(NOMINAL), read(folder)
    done = settled(results, registry.code_of(algorithms))
    work = ["machine", *(item for item in items(phases, algorithms, wanted) if item not in done)]
    return announced(timetable(work, algorithms, results), wanted, results, budget)
