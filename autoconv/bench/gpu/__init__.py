"""Everything that needs a GPU, in one command that may be interrupted: `autoconv bench --device cuda`.

The work is a list of items, the most valuable first; each is done by a helper process and its result is one
line of JSON in `results.jsonl`. An item whose helper dies, hangs, or loses the device is a line too, and the
next one gets a new helper. The same command goes on where the lines end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoconv import networks, registry
from autoconv.algorithm import Algorithm
from autoconv.bench.gpu.cases import cases
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.tuning.worker import DeviceProcess, NoAnswerError

PHASES = ("check", "tune", "table")
RESULTS = "results.jsonl"
PATIENCE = 180.0  # seconds without a sign of life from a helper
GRACE = 15.0  # seconds that an item may still take when the budget is spent
NETWORKS = ("alexnet", "vgg16", "resnet50", "googlenet")
BATCH = 32
CEILINGS = ("copy", "float32", "tf32", "float16", "float64")
NOMINAL = {"float32": 5e13, "float16": 5e14, "bfloat16": 5e14}, 3e12  # FLOP/s and bytes/s that order the layers
UNUSUAL = (  # what the networks lack: grouped, one-dimensional, dilated, odd channel counts
    "fwd-float32-NCHW-N32-C128-H56-W56-K128-R3-S3-padding1x1-groups32",
    "fwd-float32-NCHW-N32-C64-H1-W4096-K64-R1-S31-padding0x15",
    "fwd-float32-NCHW-N32-C256-H1-W2048-K256-R1-S31-padding0x15-groups256",
    "fwd-float32-NCHW-N32-C128-H28-W28-K128-R3-S3-padding2x2-dilation2x2",
    "fwd-float32-NCHW-N32-C37-H56-W56-K53-R3-S3-padding1x1",
    "fwd-float32-NCHW-N8-C128-H56-W56-K128-R31-S31-padding15x15-groups128",
)

Result = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """Layers whose mean is stated; `repeats` of each counted once, as the bars are on layers."""

    name: str
    layers: tuple[ConvLayer, ...]


def _plain(layer: ConvLayer, **changes: Any) -> ConvLayer:
    """The convolution alone: what the other library fuses or not is another question."""
    return layer.replace(**({"N": BATCH, "bias": False, "residual": False, "activation": None} | changes))


def _networks(names: Sequence[str], **changes: Any) -> tuple[ConvLayer, ...]:
    """Every different layer of some networks, the longest first by its operations and traffic."""
    peaks, bandwidth = NOMINAL
    layers = dict.fromkeys(_plain(named.layer, **changes) for name in names for named in networks.load(name).layers)
    return tuple(sorted(layers, key=lambda x: -max(x.flops / peaks[x.dtype], x.bytes / bandwidth)))


def targets(names: Sequence[str] = NETWORKS, batch: int = BATCH) -> list[Target]:
    """What is tuned and compared, what there is most to gain from first."""
    single = _networks(names, N=batch)
    found = [
        Target("float32, 3x3 and 5x5", tuple(x for x in single if x.R == x.S and x.R in (3, 5) and x.stride == (1, 1))),
        Target("float32", single),
        Target("float16, NHWC", _networks(names, N=batch, dtype="float16", layout="NHWC")),
        Target("bfloat16, NHWC", _networks(names, N=batch, dtype="bfloat16", layout="NHWC")),
        Target("unusual, float32", tuple(map(ConvLayer.parse, UNUSUAL)) if tuple(names) == NETWORKS else ()),
        Target("float16, NCHW", _networks(names, N=batch, dtype="float16")),
        Target("float32, dgrad", _networks(names, N=batch, direction="dgrad")),
        Target("float32, wgrad", _networks(names, N=batch, direction="wgrad")),
    ]
    return [target for target in found if target.layers]


def items(phases: Sequence[str], algorithms: Sequence[Algorithm[Any]], wanted: Sequence[Target]) -> Iterator[str]:
    """The work in the order of its value; an item is `kind/arguments`."""
    own = [algorithm for algorithm in algorithms if algorithm.vendor is None]
    if "check" in phases:
        yield from (f"ceiling/{what}" for what in CEILINGS)
        yield from (f"launch/{algorithm.name}/{algorithm.version}" for algorithm in own)
        yield "host"
        for algorithm in own:
            yield f"compile/{algorithm.name}/{algorithm.version}"
            yield from (f"check/{algorithm.name}/{algorithm.version}/{n}" for n in range(len(cases(algorithm))))
    layers = dict.fromkeys(layer.key() for target in wanted for layer in target.layers)
    for mode in ("hybrid", "profile"):  # a few candidates of every layer before all of any
        for key in layers:
            yield from (f"{phase}/{mode}/{key}" for phase in ("tune", "table") if phase in phases)


class Helper(DeviceProcess):
    """A process that does one item after the other."""

    def __init__(self, device: Device, folder: Path) -> None:
        super().__init__(device, "autoconv.bench.gpu.helper")
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
    """The results so far; a last line that was cut short is not one."""
    try:
        text = (folder / RESULTS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and isinstance(result.get("item"), str):
            found.append(result)
    return found


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
    results = read(folder)
    helper = Helper(device, folder)
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        if file.tell() and not (folder / RESULTS).read_bytes().endswith(b"\n"):
            file.write("\n")  # after a line that was cut short

        def do(item: str) -> Result:
            say(item)
            began = clock()
            left = budget - (began - start)
            result: Result = {"item": item} | helper.ask(item, max(GRACE, min(PATIENCE, left + GRACE)))
            result["seconds"] = round(clock() - began, 3)
            file.write(json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())
            results.append(result)
            return result

        try:
            before = [r["key"] for r in results if r["item"] == "machine" and "key" in r]
            machine = do("machine")
            if "failure" in machine:
                raise PlanError(f"the device does not answer: {machine['failure']}")
            if before and machine["key"] != before[0]:
                raise PlanError(f"{folder} holds results of {before[0]}, this is {machine['key']}: use another folder")
            done = {result["item"] for result in results}
            left = [item for item in items(phases, registry.algorithms(device), wanted) if item not in done]
            while left and clock() - start < budget:
                do(left.pop(0))
        finally:
            helper.close()
    return results, len(left)
