"""Kernels for all nodes of a graph, whose layers have plans."""

from __future__ import annotations

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import NativeKernel
from autoconv.cpu.device import CPU
from autoconv.cpu.fused import kernels, packing
from autoconv.cpu.fused.geometry import Caches, FusedBlocking, FusedLayers, workspace_bytes
from autoconv.networks.choice.choose import Planned
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import FusedConv
from autoconv.networks.passes.fused_layers import layers_of
from autoconv.networks.run.instance import Schedule
from autoconv.networks.run.steps import Call, Operand, Ref, Scratch, Step, StepMaker, calls_of, function_of
from autoconv.plans import Plan

Packed = dict[str, Array]  # filters as kernels read them, by what they were packed from and for


def scheduled(made: Planned, device: CPU, packed: Packed, keep_denormals: bool = False) -> Schedule:
    """Kernels for all nodes; filters that are not packed yet are, and kept.

    Parameters
    ----------
    made : Planned
    device : CPU
    packed : dict of str to array
    keep_denormals : bool

    Returns
    -------
    Schedule
    """
    graph, views, steps = made.parts.graph, made.views, []
    maker, layers = StepMaker(graph, views, device), _LayerSteps(graph, device, packed)
    for node in views.computed:
        origin = made.parts.origin(node.name)
        if isinstance(node.operator, FusedConv):
            steps.append(layers.fused(node, layers_of(graph, node), made.fused[origin]))
        elif layer_of(graph, node) is not None:
            steps.append(layers.step(node, made.plans[origin]))
        else:
            steps.append(maker.step(node))
    return Schedule(graph, views, device, steps, keep_denormals)


class _LayerSteps:
    """Makes the steps of layers."""

    def __init__(self, graph: Graph, device: CPU, packed: Packed) -> None:
        self._graph, self._device, self._packed = graph, device, packed

    def step(self, node: Node, made: Plan) -> Step:
        """What runs a convolution or a fully connected layer."""
        kernel, by, constant = made.kernel, str(made.candidate), node.inputs[1] in self._graph.constants
        if not isinstance(kernel, NativeKernel) or (kernel.packed_bytes and not constant):
            return Step(node, by, function=function_of(made, self._graph.constants.get(node.inputs[1])))
        rest = [Ref(name) for name in node.inputs[2:]]
        first = made.layer.bias or made.layer.quantized
        epilogue = rest[0] if first else None, rest[-1] if made.layer.residual else None
        weights: Operand = self._weights(node, made) if kernel.packed_bytes else Ref(node.inputs[1])
        operands: tuple[Operand, ...] = (Ref(node.inputs[0]), weights, Ref(node.name), *epilogue, Scratch())
        return Step(node, by, calls_of(kernel, operands))

    def _weights(self, node: Node, made: Plan) -> Array:
        key = f"{node.inputs[1]} {made.layer} {made.candidate}"
        if key not in self._packed:
            w = self._graph.constants[node.inputs[1]]
            self._packed[key] = made.pack(w.reshape(made.layer.w_shape)).buffer
        return self._packed[key]

    def fused(self, node: Node, layers: FusedLayers, blocking: FusedBlocking) -> Step:
        """What runs layers that are one node."""
        assert isinstance(node.operator, FusedConv)
        device, graph, caches = self._device, self._graph, Caches.of(self._device)
        others = node.operator.others(node.inputs)
        key = f"{[names[0] for names in others]} {layers} {blocking}"
        if key not in self._packed:
            filters = [graph.constants[names[0]] for names in others]
            self._packed[key] = packing.packed(device.instruction_set, layers, blocking, filters)
            biases = [
                graph.constants[names[1]].reshape(-1)
                for names, layer in zip(others, layers.layers, strict=True)
                if layer.bias
            ]
            self._packed[f"{key} biases"] = np.concatenate([*biases, np.zeros(1, np.float32)])
        program = compiler.build(kernels.emit, device.instruction_set, layers, blocking, caches)
        residual = Ref(node.inputs[-1]) if layers.layers[-1].residual else None
        operands: tuple[Operand, ...] = (
            Ref(node.inputs[0]), self._packed[key], Ref(node.name), self._packed[f"{key} biases"], residual, Scratch(),
        )  # fmt: skip
        needed = workspace_bytes(device.instruction_set, layers, blocking, caches)
        return Step(node, f"fused[layers={len(layers.layers)},{blocking}]", (Call(program, operands, needed),))
