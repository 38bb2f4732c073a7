"""How long operators that are no layers take: measured, and kept beside the records of layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autoconv.common import code_hash
from autoconv.device import Device
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Operator, TensorType, random_inputs
from autoconv.networks.run.instance import Schedule
from autoconv.networks.run.memory import Views
from autoconv.networks.run.runtime import instance_of, step_maker
from autoconv.records.cache import TuningCache
from autoconv.records.kept import Kept

WARM_UP, SAMPLES = 3, 15
TOGETHER = 8  # runs in one call, as kernels of a network follow each other


class OperatorTimes:
    """Seconds of operators on a device, by what they are applied to.

    A time is the median over some calls of several runs of the operator's kernel, its input as the last run left it. It
    counts until the code of the kernels between layers changes.

    Parameters
    ----------
    device : Device
    cache : TuningCache
        Beside whose records times are kept.
    measure : bool
        Whether to time what is not on record.
    """

    def __init__(self, device: Device, cache: TuningCache, measure: bool) -> None:
        self._device, self._cache, self._measure = device, cache, measure
        # Of the code that writes a device's kernels, all of them.
        version = code_hash.version(f"autoconv.{device.kind}.operators.elementwise")
        self._kept = Kept(cache, device, "operator", version)
        self._known: dict[str, float] = {}

    def seconds(self, operator: Operator, inputs: Sequence[TensorType]) -> float:
        """The time on record, or measured now; infinite where it is not known.

        Parameters
        ----------
        operator : Operator
        inputs : sequence of TensorType

        Returns
        -------
        float
        """
        what = f"{operator} of {', '.join(map(str, inputs))}"
        if what not in self._known:
            found = self._recorded(what)
            if math.isinf(found) and self._measure:
                with self._cache.timing_lock(self._device.key):
                    samples = _samples(operator, inputs, self._device)
                found = statistics.median(samples)
                self._kept.keep(what, operator=what[:200], seconds=found, samples=len(samples))
            self._known[what] = found
        return self._known[what]

    def _recorded(self, what: str) -> float:
        """The time on record, if today's code took it; what is none is not known."""
        seconds = self._kept.read(what, lambda facts: float(facts["seconds"]))
        return seconds if seconds is not None and seconds > 0 else math.inf


def _samples(operator: Operator, inputs: Sequence[TensorType], device: Device) -> list[float]:
    graph = Graph("one operator")
    names = [graph.add_input(f"x{n}", found) for n, found in enumerate(inputs)]
    for _ in range(TOGETHER):
        graph.outputs["y"] = graph.add("y", operator, *names)
    views = Views(graph, device.alignment, device.pitched)
    maker = step_maker(graph, views, device)
    instance = instance_of(Schedule(graph, views, device, [maker.step(node) for node in views.computed]))
    given = {name: device.asarray(array) for name, array in random_inputs(graph.inputs).items()}
    calls = []
    for _ in range(WARM_UP + SAMPLES):
        seconds: list[float] = []
        instance.run(given, seconds)
        calls.append(sum(seconds) / TOGETHER)
    return calls[WARM_UP:]
