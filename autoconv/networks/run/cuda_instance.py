"""One run at a time on a GPU: all kernels of a network as one CUDA graph, over an arena of its own."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from autoconv.algorithm import Array
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.device import CUDA
from autoconv.errors import ArrayError, PlanError
from autoconv.networks.run.instance import Schedule
from autoconv.networks.run.steps import Call, Operand, Ref, Scratch

Launch = Callable[[], None]


class CudaInstance:
    """Memory for one run at a time, and a graph of the launches that work in it.

    A graph holds addresses: inputs are copied to where it reads them, and outputs from where it leaves them. What is
    launched runs on the caller's stream, after what ran in this memory before, on whichever stream that was.

    Parameters
    ----------
    schedule : Schedule
        Whose steps all are calls.
    apart : bool
        Whether every step is launched by itself, so that it can be timed.
    """

    most_idle = 16  # are kept, one for every stream in use: to make another is to capture it

    def __init__(self, schedule: Schedule, apart: bool = False) -> None:
        assert isinstance(schedule.device, CUDA)
        self.schedule, self._device = schedule, schedule.device
        graph = schedule.graph
        with self._device.selected():
            self._who()
            self._device.compile(call.program for call in schedule.calls if isinstance(call.program, Unit))
            self._arena = self._device.buffer(max(schedule.arena_bytes, 1))
            types = graph.inputs | {root: graph.types[root] for root in schedule.outputs}
            self._fixed = {name: self._device.empty(t.shape, t.dtype) for name, t in types.items()}
            self._steps = [[self._bound(n, call) for call in step.calls] for n, step in enumerate(schedule.steps)]
            self._last: int | None = None  # who ran it
            self._done = self._device.xp.cuda.Event(disable_timing=True)
            # The memory goes back to the stream that asked for it, and another one may still work in it.
            weakref.finalize(self, self._done.synchronize).atexit = False
            self._graph = None if apart else self._device.captured(self._launch)

    def available(self) -> bool:
        """Whether it can run at once, on the current stream: nothing runs in its memory, or on that stream alone."""
        with self._device.selected():
            return self._last in (None, self._device.stream()) or bool(self._done.done)

    def finish(self) -> None:
        """Wait until nothing runs in its memory."""
        if self._last is not None:
            self._done.synchronize()

    def run(
        self, inputs: Mapping[str, Array], seconds: list[float] | None = None, alone: bool = False
    ) -> dict[str, Array]:
        """The outputs, by name, as soon as the current stream has computed them.

        The time of every part is added to `seconds`: of the graph, or where steps are launched by themselves of each.
        """
        if alone:
            raise ArrayError("alone=True: expected False on a GPU, whose caches are not emptied between steps")
        device, graph = self._device, self.schedule.graph
        with device.selected():
            stream, who = device.xp.cuda.get_current_stream(), self._who()
            if self._last not in (None, who):
                stream.wait_event(self._done)
            for name, array in inputs.items():
                self._fixed[name][...] = array
            if self._graph is None:
                parts: list[Launch] = [functools.partial(_all, launches) for launches in self._steps]
            else:
                parts = [functools.partial(self._graph.launch, stream)]
            if seconds is None:
                _all(parts)
            else:
                seconds += self._timed(parts, stream)
            found = {name: self._array(value).copy() for name, value in graph.outputs.items()}
            self._done.record(stream)
            self._last = who
        return found

    def _who(self) -> int:
        """The current stream and thread."""
        who = self._device.stream()
        if who < 0:
            name = self.schedule.graph.name
            raise PlanError(f"{name}: expected a stream that is not captured: a network is a graph of its own")
        return who

    def _launch(self) -> None:
        """All kernels, in order."""
        for launches in self._steps:
            _all(launches)

    def _timed(self, parts: list[Launch], stream: Any) -> list[float]:
        """Seconds of each part, from one event to the next."""
        cupy = self._device.xp
        events = [cupy.cuda.Event() for _ in range(len(parts) + 1)]
        events[0].record(stream)
        for part, event in zip(parts, events[1:], strict=True):
            part()
            event.record(stream)
        events[-1].synchronize()
        pairs = itertools.pairwise(events)
        return [float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 for start, stop in pairs]

    def _bound(self, step: int, call: Call) -> Launch:
        """A call on the arrays of this instance."""

        def found(operand: Operand) -> Array | None:
            if isinstance(operand, Scratch):
                start = self.schedule.offsets.get(step, 0) + operand.offset
                return self._arena[start : start + call.workspace_bytes]
            return self._array(operand.name) if isinstance(operand, Ref) else operand

        program = call.program
        launch = self._device.load(program) if isinstance(program, Unit) else program
        assert callable(launch)
        return functools.partial(launch, *map(found, call.operands))

    def _array(self, name: str) -> Array:
        """An array of the graph, as it lies."""
        schedule, graph = self.schedule, self.schedule.graph
        root, offset = schedule.views.root(name)
        found = graph.types[name]
        if root in graph.constants:
            base = schedule.constant(root)
        elif root in self._fixed:
            base = self._fixed[root]
        else:
            start = schedule.offsets[root]
            base = self._arena[start : start + graph.types[root].nbytes]
        raw = base.reshape(-1).view("uint8")[offset : offset + found.nbytes]
        return raw.view(found.dtype).reshape(found.shape)


def _all(launches: list[Launch]) -> None:
    for launch in launches:
        launch()
