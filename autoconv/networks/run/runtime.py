"""What differs from one kind of device to another where networks run: inputs, who finds kernels, and who runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from autoconv import registry
from autoconv.algorithm import Array
from autoconv.device import Device
from autoconv.errors import ArrayError, PlanError
from autoconv.networks.graph import Graph
from autoconv.networks.layer_list import layer_of
from autoconv.networks.passes.epilogue import split_activations
from autoconv.networks.passes.fusion import fuse_elementwise
from autoconv.networks.passes.products import group_products
from autoconv.networks.run.instance import Instance, Schedule
from autoconv.networks.run.memory import Views
from autoconv.networks.run.steps import StepMaker

if TYPE_CHECKING:
    from autoconv.networks.run.cuda_instance import CudaInstance

GPU = "cuda"  # the kind of device whose modules are imported where one is meant, and not before


def for_device(graph: Graph, device: Device) -> Graph:
    """A graph after all passes, as the kernels of a device can compute it.

    Products of computed matrices become layers on a CPU. Activations that those of a GPU do not apply while they store
    become nodes of their own.

    Raises
    ------
    PlanError
        For a layer that no kernel of the device computes; the message names node and operator.
    """
    found = graph.copy()
    if device.kind != GPU:
        group_products(found)
        return found
    general = [algorithm for algorithm in registry.algorithms(device) if algorithm.takes_all]
    split_activations(found, registry.fused_activations(device))
    fuse_elementwise(found)
    found.clean()
    for node in found.nodes.values():
        layer = layer_of(found, node)
        if layer is None:
            continue
        reasons = [algorithm.unsupported(layer) for algorithm in general]
        if all(reasons):
            why = "; ".join(reason for some in reasons for reason in some)
            raise PlanError(f"{graph.name}: node {node.name!r}, {node.operator.kind}: no kernel for a GPU: {why}")
    return found


def inputs_of(graph: Graph, device: Device, arrays: tuple[Array, ...], named: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of a run by name, in order or by name, as kernels can read them.

    Raises
    ------
    ArrayError
        For an input that is missing, that the graph does not have, or of another shape or type.
    """
    expected = graph.inputs
    if len(arrays) > len(expected):
        raise ArrayError(f"{graph.name}: expected inputs {', '.join(expected)}, got {len(arrays)} arrays")
    given = dict(zip(expected, arrays, strict=False))
    for name, array in named.items():
        if name not in expected or name in given:
            again = "is given twice" if name in given else f"expected one of {', '.join(expected)}"
            raise ArrayError(f"{graph.name}: input {name!r}: {again}")
        given[name] = array
    found = {}
    for name, wanted in expected.items():
        if name not in given:
            raise ArrayError(f"{graph.name}: input {name!r} is missing: expected {wanted}")
        array = given[name] if device.owns(given[name]) else device.adopt(given[name], name)
        if array.shape != wanted.shape or array.dtype != np.dtype(wanted.dtype):
            raise ArrayError(
                f"{graph.name}: input {name!r}: planned for {wanted}, got {array.dtype} {tuple(array.shape)}"
            )
        found[name] = device.asarray(array)  # a matrix of NumPy's becomes an array
        if not device.ready(array):
            with device.selected():
                found[name] = device.empty(wanted.shape, wanted.dtype)
                found[name][...] = array
    return found


def step_maker(graph: Graph, views: Views, device: Device) -> StepMaker:
    """What finds kernels for the nodes of a graph."""
    if device.kind == GPU:
        from autoconv.networks.run.cuda_steps import CudaStepMaker

        return CudaStepMaker(graph, views, device)
    return StepMaker(graph, views, device)


def instance_of(schedule: Schedule, apart: bool = False) -> Instance | CudaInstance:
    """Memory for one run at a time; with `apart`, of steps that can be timed."""
    if schedule.device.kind == GPU:
        from autoconv.networks.run.cuda_instance import CudaInstance

        return CudaInstance(schedule, apart)
    return Instance(schedule, apart)
