"""`CompiledNetwork`: a graph with a kernel for every node, ready to run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.text import size
from autoconv.cpu.device import CPU
from autoconv.errors import ArrayError, ConfigError, PlanError
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.passes import optimized
from autoconv.networks.run.instance import Instance, Schedule
from autoconv.networks.run.memory import Views
from autoconv.networks.run.steps import Call, Ref, Step, StepMaker
from autoconv.plans import Plan
from autoconv.registry import resolve
from autoconv.tuning.planner import plan


class CompiledNetwork:
    """A network, ready to run: made by `autoconv.load`.

    All its kernels run in one call, on the threads of the device, in memory that is arranged beforehand. Several
    threads may run it at once; each then has memory of its own.

    Attributes
    ----------
    graph : Graph
        What is computed, after all passes.
    device : CPU
        Where.
    plans : dict of str to Plan
        How each convolution and fully connected layer is computed, by the name of its node.
    """

    def __init__(self, graph: Graph, device: CPU, options: Mapping[str, Any]) -> None:
        self.graph, self.device = optimized(graph), device
        self._options = dict(options)
        self._lock = threading.Lock()
        self.plans: dict[str, Plan] = {}
        self._packed: dict[str, Array] = {}
        self._compile("heuristic")

    def _compile(self, mode: str, **options: Any) -> None:
        """Choose a plan for every layer, and arrange everything anew."""
        views = Views(self.graph)
        maker = StepMaker(self.graph, views, self.device)
        steps = []
        for node in self.graph.nodes.values():
            if node.name in views.free:
                continue
            layer = layer_of(self.graph, node)
            if layer is None:
                steps.append(maker.step(node))
                continue
            constant = node.inputs[1] in self.graph.constants
            made = plan(
                layer, mode, device=self.device, weights="constant" if constant else "varying",
                **(self._options | options),
            )  # fmt: skip
            steps.append(self._layer_step(node, made, constant))
        schedule = Schedule(self.graph, views, self.device, steps)
        with self._lock:
            self._schedule, self._instances = schedule, [Instance(schedule)]

    def _layer_step(self, node: Node, made: Plan, constant: bool) -> Step:
        """What runs a convolution or a fully connected layer."""
        self.plans[node.name], kernel = made, made.kernel
        by = str(made.candidate)
        program = getattr(kernel, "program", None)
        if program is None or not (constant or not kernel.packed_bytes):
            return Step(node, by, function=_planned(made))
        operator = node.operator
        rest = [Ref(name) for name in node.inputs[2:]]
        bias, residual = getattr(operator, "bias", False), getattr(operator, "residual", False)
        weights: Ref | Array = Ref(node.inputs[1])
        if constant and kernel.packed_bytes:
            weights = self._packed_weights(node, made)
        epilogue = rest[0] if bias else None, rest[-1] if residual else None
        operands = Ref(node.inputs[0]), weights, Ref(node.name), *epilogue, None
        return Step(node, by, (Call(program, operands, kernel.workspace_bytes),))

    def _packed_weights(self, node: Node, made: Plan) -> Array:
        key = f"{node.inputs[1]} {made.layer} {made.candidate}"
        if key not in self._packed:
            w = self.graph.constants[node.inputs[1]]
            self._packed[key] = made.pack(w.reshape(made.layer.w_shape)).buffer
        return self._packed[key]

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arrays between input and output, scratch memory included, of one run at a time."""
        return self._schedule.arena_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all filters as kernels read them, and of other constants."""
        return self._schedule.weight_bytes

    def tune(self, mode: str = "profile", **options: Any) -> CompiledNetwork:
        """Time the candidates of every layer that has no facts yet, and run by the best from now on.

        Parameters
        ----------
        mode : str
            As for `plan`.
        **options
            As for `plan`: `budget`, `isolate`, `progress`.

        Returns
        -------
        CompiledNetwork
            This one.

        Raises
        ------
        PlanError
            As `plan` does.

        Examples
        --------
        >>> import autoconv
        >>> net = autoconv.load("model.onnx").tune(budget=0.2)  # doctest: +SKIP
        """
        before = self._packed
        self._packed = {}
        try:
            self._compile(mode, **options)
        except PlanError:
            self._packed = before
            raise
        return self

    def run(self, *arrays: Array, **named: Array) -> Any:
        """Compute the outputs.

        Parameters
        ----------
        *arrays : array
            The inputs, in the order of the file; of their shapes, and float32.
        **named : array
            Inputs by name, in place of those.

        Returns
        -------
        array, or dict of str to array
            The output; where there are several, by name. Memory of its own.

        Raises
        ------
        ArrayError
            For an input that is missing, that the network does not have, or of another shape or type.

        Examples
        --------
        >>> import autoconv, numpy as np
        >>> net = autoconv.load("model.onnx", batch=1)  # doctest: +SKIP
        >>> y = net.run(np.zeros((1, 3, 224, 224), np.float32))  # doctest: +SKIP
        """
        inputs = self._inputs(arrays, named)
        with self._lock:
            schedule = self._schedule
            instance = self._instances.pop() if self._instances else None
        found = (instance or Instance(schedule)).run(inputs)
        if instance is not None:
            with self._lock:
                if instance.schedule is self._schedule:
                    self._instances.append(instance)
        return found if len(found) > 1 else next(iter(found.values()))

    def _inputs(self, arrays: tuple[Array, ...], named: Mapping[str, Array]) -> dict[str, Array]:
        expected = self.graph.inputs
        if len(arrays) > len(expected):
            raise ArrayError(f"{self.graph.name}: expected inputs {', '.join(expected)}, got {len(arrays)} arrays")
        given = dict(zip(expected, arrays, strict=False))
        for name, array in named.items():
            if name not in expected or name in given:
                again = "is given twice" if name in given else f"expected one of {', '.join(expected)}"
                raise ArrayError(f"{self.graph.name}: input {name!r}: {again}")
            given[name] = array
        found = {}
        for name, wanted in expected.items():
            if name not in given:
                raise ArrayError(f"{self.graph.name}: input {name!r} is missing: expected {wanted}")
            array = given[name] if self.device.owns(given[name]) else self.device.adopt(given[name], name)
            if array.shape != wanted.shape or array.dtype.name != wanted.dtype:
                raise ArrayError(
                    f"{self.graph.name}: input {name!r}: planned for {wanted}, got {array.dtype} {tuple(array.shape)}"
                )
            found[name] = array if self.device.ready(array) else np.ascontiguousarray(array)
        return found

    def explain(self) -> str:
        """What runs every node, and in how much memory.

        Returns
        -------
        str
            Lines to print.
        """
        steps = self._schedule.steps
        width = max((len(step.node.name) for step in steps), default=0)
        foreign = [step.node.name for step in steps if step.function is not None]
        lines = [
            f"{self.graph.name}: {len(steps)} steps, {len(foreign)} of them not by a kernel of ours, "
            f"in {self._schedule.segments} calls",
            f"  {size(self.arena_bytes)} of arrays and scratch memory, {size(self.weight_bytes)} of weights",
        ]
        for step in steps:
            shape = "x".join(map(str, self.graph.types[step.node.name].shape))
            lines.append(f"  {step.node.name:<{width}}  {step.node.operator.kind:<14} {shape:<18} {step.by}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<CompiledNetwork {self.graph.name} on {self.device.name}>"


def _planned(made: Plan) -> Any:
    """A function of a node's arrays that runs a plan."""

    def run(*arrays: Array) -> Array:
        x, w, *rest = arrays
        layer = made.layer
        bias = rest[0] if layer.bias else None
        residual = rest[-1].reshape(layer.y_shape) if layer.residual else None
        a_shape, b_shape = layer.input_shapes
        return made.run(x.reshape(a_shape), w.reshape(b_shape), bias, residual)

    return run


def load(path: str | Path, batch: int | None = None, *, device: Any = None, **options: Any) -> CompiledNetwork:
    """A network from an ONNX file, ready to run.

    Layers run by what is on record for them, or by the best estimate; `CompiledNetwork.tune` measures.

    Parameters
    ----------
    path : str or Path
        An ONNX file; the extra `onnx` reads it.
    batch : int, optional
        Images at a time, where the file leaves that open; else it has to be the file's.
    device : Device or str, optional
        The CPU, or one of fewer threads.
    **options
        As for `plan`: `workspace_limit`, `deterministic`, `tolerance`, `vendors` (False unless given), `exact`,
        `cache`. And `input_shapes`: whole shapes of inputs by name, in place of what the file says.

    Returns
    -------
    CompiledNetwork

    Raises
    ------
    ConfigError
        When the file cannot be read, or has what is not known here; the message names file, node and operator.
    PlanError
        As `plan` does, and for a device that is no CPU.

    Examples
    --------
    >>> import autoconv
    >>> net = autoconv.load("model.onnx", batch=1)  # doctest: +SKIP
    """
    from autoconv.networks import onnx_reader

    found = resolve(device)
    if not isinstance(found, CPU):
        raise PlanError(f"device={device!r}: networks run on a CPU")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ConfigError(f"batch={batch!r}: expected an integer of at least 1")
    graph = onnx_reader.read(path, batch, options.pop("input_shapes", None))
    for name, wanted in graph.inputs.items():
        if batch is not None and wanted.shape[:1] != (batch,):
            raise ConfigError(f"{path}: batch={batch}: the file says {wanted.shape} of input {name!r}")
    return CompiledNetwork(graph, found, {"vendors": False, **options})
