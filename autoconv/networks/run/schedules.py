"""Kernels for all nodes of a graph, whose layers have plans."""

from __future__ import annotations

from functools import partial

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu.codegen import compiler
from autoconv.cpu.device import CPU
from autoconv.cpu.fused import kernels, packing
from autoconv.cpu.fused.geometry import Caches, FusedBlocking, workspace_bytes
from autoconv.device import Device
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import FusedConv
from autoconv.networks.passes.fused_layers import layers_of
from autoconv.networks.run.building import built
from autoconv.networks.run.instance import Schedule
from autoconv.networks.run.memory import Views
from autoconv.networks.run.planned import Planned
from autoconv.networks.run.runtime import step_maker
from autoconv.networks.run.steps import Call, Operand, Ref, Scratch, Step
from autoconv.plans import Plan

Packed = dict[str, Array]  # filters as kernels read them, by what they were packed from and for


def scheduled(made: Planned, device: Device, packed: Packed, keep_denormals: bool = False) -> Schedule:
    """Kernels for all nodes; filters that are not packed yet are, and kept.

    Parameters
    ----------
    made : Planned
    device : Device
    packed : dict of str to array
    keep_denormals : bool

    Returns
    -------
    Schedule
    """
    graph, views, steps = made.parts.graph, made.views, []
    maker = step_maker(graph, views, device)
    plans = {
        node.name: made.plans[made.parts.origin(node.name)]
        for node in views.computed
        if not isinstance(node.operator, FusedConv) and layer_of(graph, node) is not None
    }
    builds = [maker.build(graph.nodes[name], plan) for name, plan in plans.items()]
    kernels = dict(zip(plans, built(builds, device), strict=True))
    for node in views.computed:
        if isinstance(node.operator, FusedConv):
            assert isinstance(device, CPU)
            blocking = made.fused[made.parts.origin(node.name)]
            steps.append(_fused(graph, views, node, node.operator, blocking, device, packed))
        elif (plan := plans.get(node.name)) is not None:
            weights = partial(_weights, graph, node, plan, device, packed)
            steps.append(maker.layer_step(node, plan, kernels[node.name], weights))
        else:
            steps.append(maker.step(node))
    return Schedule(graph, views, device, steps, keep_denormals)


def _weights(graph: Graph, node: Node, made: Plan, device: Device, packed: Packed) -> Array:
    key = f"{node.inputs[1]} {made.layer} {made.candidate}"
    if key not in packed:
        w = device.asarray(graph.constants[node.inputs[1]])
        packed[key] = made.pack(w.reshape(made.layer.w_shape)).buffer
    return packed[key]


def _fused(
    graph: Graph,
    views: Views,
    node: Node,
    operator: FusedConv,
    blocking: FusedBlocking,
    device: CPU,
    packed: Packed,
) -> Step:
    """What runs layers that are one node."""
    layers, caches, instruction_set = layers_of(graph, node), Caches.of(device), device.instruction_set
    others = operator.others(node.inputs)
    names = [n[0] for n in others]
    plus = [n[1] for n, one in zip(others, layers.layers, strict=True) if one.channel_values]
    weights, biases = f"{names} {layers} {blocking}", f"biases {plus}"
    if weights not in packed:
        filters = [graph.constants[name] for name in names]
        packed[weights] = packing.packed(instruction_set, layers, blocking, caches, filters)
    if biases not in packed:
        found = [graph.constants[name].reshape(-1) for name in plus]
        packed[biases] = np.concatenate([*found, np.zeros(1, np.float32)])
    pitches = (views.pitch(name) for name in (node.inputs[0], node.name))
    placed = layers.apart(*(None if pitch is None else pitch // layers.depthwise.itemsize for pitch in pitches))
    program = compiler.build(kernels.emit, instruction_set, placed, blocking, caches)
    residual = Ref(node.inputs[-1]) if layers.layers[-1].residual else None
    ends: tuple[Operand, ...] = packed[biases], residual, Scratch()
    operands = Ref(node.inputs[0]), packed[weights], Ref(node.name), *ends
    needed = workspace_bytes(instruction_set, layers, blocking, caches)
    return Step(node, f"fused[layers={len(layers.layers)},{blocking}]", (Call(program, operands, needed),))
