"""One run at a time: arrays in an arena, and tables of kernels with the addresses of their operands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.arrays import contiguous
from autoconv.common.text import one_line
from autoconv.cpu.codegen import compiler
from autoconv.cpu.device import CPU
from autoconv.cpu.operators import sequence
from autoconv.cpu.pool import Entry
from autoconv.device import Device
from autoconv.errors import ArrayError
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Foreign
from autoconv.networks.run.memory import Views, arranged, blocks, own_outputs
from autoconv.networks.run.steps import Call, Ref, Scratch, Step


class Schedule:
    """Steps in order, and where every array lies while they run.

    Arrays lie in the arena, but for the graph's inputs, its constants, and outputs that have memory of their own.
    """

    def __init__(
        self, graph: Graph, views: Views, device: Device, steps: Sequence[Step], keep_denormals: bool = False
    ) -> None:
        self.keep_denormals = keep_denormals
        self.graph, self.views, self.device, self.steps = graph, views, device, list(steps)
        self.outputs = own_outputs(graph, views)
        scratch = [max((call.workspace_bytes for call in step.calls), default=0) for step in steps]
        self.blocks = blocks(views, scratch)
        self.offsets, self.arena_bytes = arranged(self.blocks)
        self.segments = self._segments()
        self._constants: dict[str, Array] = {}
        arrays = (a for call in self.calls for a in call.operands if a is not None and not isinstance(a, Ref | Scratch))
        used: dict[int, int] = {id(a): a.nbytes for a in arrays}
        named = {ref.name for call in self.calls for ref in call.operands if isinstance(ref, Ref)}
        named |= {name for step in steps if step.function is not None for name in step.node.inputs}
        self.weight_bytes = sum(used.values()) + sum(
            value.nbytes for name, value in graph.constants.items() if name in named
        )

    @property
    def calls(self) -> list[Call]:
        """Every kernel, in order."""
        return [call for step in self.steps for call in step.calls]

    def constant(self, name: str) -> Array:
        """A constant of the graph on the device, copied there once."""
        if name not in self._constants:
            self._constants[name] = self.device.asarray(self.graph.constants[name])
        return self._constants[name]

    def _segments(self) -> int:
        """How many calls a run takes: kernels that follow each other are one."""
        kinds = [step.function is None for step in self.steps]
        return sum(1 for n, ours in enumerate(kinds) if not ours or n == 0 or not kinds[n - 1])


class Instance:
    """Memory for one run at a time.

    Tables hold addresses: those of the arena and of constants from the start, those of inputs and of outputs with
    memory of their own for each run.

    Parameters
    ----------
    schedule : Schedule
    apart : bool
        Whether every step is a call of its own, so that it can be timed.
    """

    most_idle = 1  # are kept: to make another takes little

    def __init__(self, schedule: Schedule, apart: bool = False) -> None:
        self.schedule = schedule
        assert isinstance(schedule.device, CPU)
        self._device = schedule.device
        self._arena = self._device.buffer(max(schedule.arena_bytes, 1))
        self._parts: list[_Table | Step] = []
        for n, step in enumerate(schedule.steps):
            if step.function is not None:
                self._parts.append(step)
                continue
            if apart or not self._parts or isinstance(self._parts[-1], Step):
                self._parts.append(_Table())
            table = self._parts[-1]
            assert isinstance(table, _Table)
            for call in step.calls:
                table.add(self, n, call)
        for part in self._parts:
            if isinstance(part, _Table):
                part.close(self._device, schedule.keep_denormals)

    @property
    def threads(self) -> int:
        """Of its device."""
        return self._device.threads

    def available(self) -> bool:
        """Whether it can run at once: always, as `run` waits for its end."""
        return True

    def finish(self) -> None:
        """Wait until nothing runs in its memory."""

    def run(
        self, inputs: Mapping[str, Array], seconds: list[float] | None = None, alone: bool = False
    ) -> dict[str, Array]:
        """The outputs, by name; the time of every part is added to `seconds`.

        With `alone`, whose parts are single steps, each is timed as the candidates of layers are: filters and other
        constants have to come from where the rest of a network leaves them, while scratch memory and arrays that were
        computed before are in cache as far as they fit.
        """
        schedule, graph = self.schedule, self.schedule.graph
        outside = dict(inputs)
        given: dict[str, Array] = {}  # by functions, and not yet where it belongs
        for root in schedule.outputs:
            found = graph.types[root]
            outside[root] = schedule.device.empty(found.shape, found.dtype)
        for n, part in enumerate(self._parts):
            if alone:
                node = schedule.steps[n].node
                computed = [name for name in reversed(node.inputs) if name not in graph.constants]
                arrays = [self.array(name, outside) for name in (node.name, *computed)]
                warm = [part for a in arrays for part in ([a] if a.flags.c_contiguous else a)]
                self._device.settle(self._scratch(n), *warm, filters=schedule.steps[n].constants)
            start = time.perf_counter()
            if isinstance(part, _Table):
                part.run(outside)
            else:
                name = part.node.name
                if name not in given:
                    given |= self._elsewhere(part, [self.array(value, outside) for value in part.node.inputs])
                self.array(name, outside)[...] = given.pop(name).reshape(graph.types[name].shape)
            if seconds is not None:
                seconds.append(time.perf_counter() - start)
        return {name: self._result(name, value, outside) for name, value in graph.outputs.items()}

    def _elsewhere(self, step: Step, arrays: Sequence[Array]) -> Mapping[str, Array]:
        """What a step's function makes of arrays; another library may not take them, and raises what it likes."""
        node = step.node
        assert step.function is not None
        try:
            return step.function(*arrays)
        except Exception as error:
            if not isinstance(node.operator, Foreign):
                raise
            what = f"{self.schedule.graph.name}: node {node.name!r} ({node.operator.kind})"
            raise ArrayError(f"{what}: {step.by} did not compute it from these inputs: {one_line(error)}") from error

    def _result(self, name: str, value: str, outside: Mapping[str, Array]) -> Array:
        """An output, in memory of its own; to find that takes long when the kernels have just had all caches."""
        if self.schedule.outputs.get(value) == name:
            return outside[value]
        found = self.array(value, outside)
        return found if name in self.schedule.outputs.values() else found.copy()

    def array(self, name: str, outside: Mapping[str, Array]) -> Array:
        """An array of the graph, as it lies."""
        graph = self.schedule.graph
        root, offset = self.schedule.views.root(name)
        found = graph.types[name]
        if root in graph.constants:
            base = graph.constants[root]
        elif root in outside:
            base = outside[root]
        else:
            start = self.schedule.offsets[root]
            base = self._arena[start : start + graph.types[root].nbytes]
        raw, pitch = base.reshape(-1).view(np.uint8), self.schedule.views.pitch(name)
        if pitch is None:
            return raw[offset : offset + found.nbytes].view(found.dtype).reshape(found.shape)
        dtype = np.dtype(found.dtype)
        strides = pitch, *(dtype.itemsize * step for step in contiguous(found.shape)[1:])
        return np.ndarray(found.shape, dtype, raw, offset, strides)

    def place(self, operand: Ref) -> tuple[str | None, int]:
        """The address of an operand; or the name of the array from outside that it lies in, and from which byte on."""
        schedule, graph = self.schedule, self.schedule.graph
        root, offset = schedule.views.root(operand.name)
        offset += operand.offset
        if root in graph.constants:
            return None, _address(graph.constants[root]) + offset
        if root in graph.inputs or root in schedule.outputs:
            return root, offset
        return None, _address(self._arena) + schedule.offsets[root] + offset

    def scratch(self, step: int) -> int:
        """The address of a step's scratch memory."""
        return _address(self._arena) + self.schedule.offsets.get(step, 0)

    def _scratch(self, step: int) -> Array:
        """A step's scratch memory."""
        block, start = self.schedule.blocks.get(step), self.schedule.offsets.get(step, 0)
        return self._arena[start : start + (0 if block is None else block.nbytes)]


class _Table:
    """Kernels that follow each other, as `cpu.operators.sequence` runs them."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._outside: list[tuple[int, str, int]] = []  # word of the table, array, and from which byte of it on

    def add(self, instance: Instance, step: int, call: Call) -> None:
        """A kernel of a step."""
        assert isinstance(call.program, compiler.Program)
        row = [call.program.address("run"), call.party or instance.threads]
        for slot, operand in enumerate(call.operands):
            if isinstance(operand, Ref):
                outside, address = instance.place(operand)
                if outside is not None:
                    word = 1 + len(self._rows) * sequence.ROW + sequence.FIRST + slot
                    self._outside.append((word, outside, address))
                row.append(0 if outside is not None else address)
            elif isinstance(operand, Scratch):
                row.append(instance.scratch(step) + operand.offset)
            else:
                row.append(0 if operand is None else _address(operand))
        self._rows.append(row)

    def close(self, device: CPU, keep_denormals: bool) -> None:
        """All kernels are there."""
        self._words = np.array([len(self._rows), *(word for row in self._rows for word in row)], np.int64)
        self._entry = Entry(compiler.build(sequence.emit, device.instruction_set), "run", device.threads)
        if keep_denormals:
            self._entry.keep_denormals()

    def run(self, outside: Mapping[str, Array]) -> None:
        """Run them, with these arrays from outside."""
        for word, name, offset in self._outside:
            self._words[word] = _address(outside[name]) + offset
        self._entry(self._words, None, self._words)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
