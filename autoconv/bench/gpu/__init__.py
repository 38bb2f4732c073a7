"""Everything that needs a GPU, in one command that may be interrupted: `autoconv bench --device cuda`.

The work is a list of items, the most valuable first (`agenda`); each is done by a helper process and its result is one
line of JSON in `results.jsonl`. What times nothing is done side by side, by several helpers. An item whose helper dies,
hangs, or loses the device is a line too, and the next one gets a new helper. The same command goes on where the lines
end, on another machine too (`archive`).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autoconv import registry
from autoconv.bench import lines
from autoconv.bench.gpu.agenda import Target, announced, items, timetable
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.tuning.process import OVERRAN, DeviceProcess, NoAnswerError

RESULTS = "results.jsonl"
CACHES = {"AUTOCONV_KERNEL_DIR": "kernels", "CUPY_CACHE_DIR": "cupy"}  # of compiled kernels: ours, and CuPy's own
PATIENCE = 180.0  # seconds without a sign of life from a helper
GRACE = 15.0  # seconds that an item may still take when the budget is spent
UNTIMED = ("sanitize", "launch", "network", "operator", "check")  # items that may run beside others
SIDE_BY_SIDE = max(1, min(12, (os.cpu_count() or 1) - 2))  # helpers, each with some hundred MiB of the GPU's memory

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


def standing(device: Device, results: Sequence[Result]) -> list[Result]:
    """The newest result of every item, but for failures with other kernels than today's."""
    code = registry.code_of(registry.algorithms(device))
    newest = {result["item"]: result for result in results}
    return [result for result in newest.values() if result["item"] in settled([result], code)]


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
    helpers, lock = [Helper(device, folder)], threading.Lock()
    with lines.adding(folder / RESULTS) as add:

        def do(item: str, patience: float, helper: Helper) -> Result:
            say(item)
            began = clock()
            result: Result = {"item": item, "code": code} | helper.ask(item, patience)
            if patience < PATIENCE and OVERRAN in result.get("failure", ""):
                return result  # the budget ended before the item did, which is still to be done
            result["seconds"] = round(clock() - began, 3)
            with lock:
                add(result)
                results.append(result)
            return result

        def lane(helper: Helper, block: list[str], finished: set[str]) -> None:
            while (seconds := budget - (clock() - start)) > 0:
                with lock:
                    if not block:
                        return
                    item = block.pop(0)
                if "seconds" in do(item, min(PATIENCE, seconds + GRACE), helper):
                    finished.add(item)

        try:
            before = [r["key"] for r in results if r["item"] == "machine" and "key" in r]
            machine = do("machine", PATIENCE, helpers[0])
            if "failure" in machine:
                raise PlanError(f"the device does not answer: {machine['failure']}")
            if before and machine["key"] != before[0]:
                raise PlanError(f"{folder} holds results of {before[0]}, this is {machine['key']}: use another folder")
            done = settled(results, code)
            left = [item for item in items(phases, algorithms, wanted) if item not in done]
            while left and budget > clock() - start:
                block, finished = _together(left), set[str]()
                helpers += [Helper(device, folder) for _ in range(min(SIDE_BY_SIDE, len(block)) - len(helpers))]
                with ThreadPoolExecutor(len(helpers)) as pool:
                    try:
                        list(pool.map(lane, helpers, itertools.repeat(block), itertools.repeat(finished)))
                    finally:  # when interrupted, which waits for what has begun, and begins nothing more
                        with lock:
                            block.clear()
                left = [item for item in left if item not in finished]
                for helper in helpers[1:]:  # what is timed has the device for itself
                    helper.close()
                del helpers[1:]
        finally:
            for helper in helpers:
                helper.close()
    return results, len(left)


def _together(left: Sequence[str]) -> list[str]:
    """The next item, or all of the next that may run at once."""
    return list(itertools.takewhile(lambda item: item.partition("/")[0] in UNTIMED, left)) or [left[0]]


def preview(folder: Path, phases: Sequence[str], budget: float, wanted: Sequence[Target]) -> list[str]:
    """What `run` would do, as lines: each item, when it should be done, and what is compared within the budget."""
    algorithms, results = registry.algorithms(NOMINAL), read(folder)
    done = settled(results, registry.code_of(algorithms))
    work = ["machine", *(item for item in items(phases, algorithms, wanted) if item not in done)]
    return announced(timetable(work, algorithms, results), wanted, results, budget)
