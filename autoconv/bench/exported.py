"""Networks as their users export them: every convolution works on what the one before has computed.

Pooling and concatenation are there as well, since a library may keep its own layout between convolutions only where
these keep it too. Local normalisation, ReLU6 and classifiers are left out: no layer list has them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoconv.algorithm import Array
from autoconv.bench.baselines.base import Prepared, Problem
from autoconv.bench.suites import OURS, Setting
from autoconv.layer import ConvLayer
from autoconv.networks.compiled.loading import load
from autoconv.tuning.timing.race import wait_until_idle
from autoconv.vendors.onnxruntime import bound_arrays, model_session, onnx_model

# Operators that are no part of a convolution, by either library's names; epilogues and changes of layout are.
OTHERS = ("MaxPool", "max_pool", "Concat")
PROFILED = 5  # runs


class Graph:
    """A network under construction, of convolutions that onnx_model has made side by side.

    Parameters
    ----------
    layers : mapping of str to ConvLayer
        By `NAME.COPY`.

    Attributes
    ----------
    left : list of str
        The copies that have no place yet.
    wires : dict of str to str
        For inputs of the model, the values that take their place.
    nodes : list
        Copies, and nodes of other operators, in the order in which they run.
    """

    def __init__(self, layers: Mapping[str, ConvLayer]) -> None:
        self.layers, self.left = layers, [*layers]
        self.wires: dict[str, str] = {}
        self.nodes: list[Any] = []

    def conv(self, name: str, x: str, residual: str = "") -> str:
        """The next copy of a layer; it leaves the residual alone where the layer has none."""
        copy = next((found for found in self.left if found.rpartition(".")[0] == name), None)
        if copy is None:
            raise ValueError(f"expected one more layer {name!r}, as the network of that name has")
        self.left.remove(copy)
        self.wires[f"{copy}.x"] = x
        if self.layers[copy].residual:
            self.wires[f"{copy}.residual"] = residual
        self.nodes.append(copy)
        return f"{copy}.y"

    def convs(self, x: str, *names: str) -> str:
        """One layer after the other."""
        for name in names:
            x = self.conv(name, x)
        return x

    def pool(self, x: str, size: int, stride: int, padding: int = 0, more: int = 0) -> str:
        """The largest of every window; `more` is padding at the end alone."""
        pads = (padding, padding, padding + more, padding + more)
        return self._node("MaxPool", x, kernel_shape=(size, size), strides=(stride, stride), pads=pads)

    def concat(self, *parts: str) -> str:
        """Channels beside each other."""
        return self._node("Concat", *parts, axis=1)

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"{operator}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name


def alexnet(graph: Graph, x: str) -> str:
    """From the image to the last convolution."""
    x = graph.pool(graph.conv("conv1", x), 3, 2)
    x = graph.pool(graph.conv("conv2", x), 3, 2)
    return graph.convs(x, "conv3", "conv4", "conv5")


def vgg16(graph: Graph, x: str) -> str:
    """Configuration D."""
    x = graph.pool(graph.convs(x, "conv1_1", "conv1_2"), 2, 2)
    x = graph.pool(graph.convs(x, "conv2_1", "conv2_2"), 2, 2)
    x = graph.pool(graph.convs(x, "conv3_1", "conv3_2", "conv3_2"), 2, 2)
    x = graph.pool(graph.convs(x, "conv4_1", "conv4_2", "conv4_2"), 2, 2)
    return graph.convs(x, "conv5_1", "conv5_1", "conv5_1")


def resnet50(graph: Graph, x: str) -> str:
    """Four stages of bottleneck blocks."""
    x = graph.pool(graph.conv("conv1", x), 3, 2, padding=1)
    for stage, blocks in ((2, 3), (3, 4), (4, 6), (5, 3)):
        for block in range(blocks):
            shortcut = x if block else graph.conv(f"conv{stage}_shortcut", x)
            x = graph.convs(x, f"conv{stage}_a" if block else f"conv{stage}_1a", f"conv{stage}_b")
            x = graph.conv(f"conv{stage}_c", x, residual=shortcut)
    return x


def googlenet(graph: Graph, x: str) -> str:
    """Nine inception modules."""
    x = graph.pool(graph.conv("conv1", x), 3, 2, more=1)
    x = graph.pool(graph.convs(x, "conv2_reduce", "conv2"), 3, 2, more=1)
    for module in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        if module in ("4a", "5a"):
            x = graph.pool(x, 3, 2, more=1)
        x = graph.concat(
            graph.conv(f"{module}_1x1", x),
            graph.convs(x, f"{module}_3x3_reduce", f"{module}_3x3"),
            graph.convs(x, f"{module}_5x5_reduce", f"{module}_5x5"),
            graph.conv(f"{module}_pool", graph.pool(x, 3, 1, padding=1)),
        )
    return x


def mobilenet_v2(graph: Graph, x: str) -> str:
    """Inverted residuals; a list names equal layers after the first block that has one."""
    x = graph.convs(x, "conv1", "block1_depthwise", "block1_project")
    x = graph.convs(x, "block2_expand", "block2_depthwise", "block2_project")
    blocks = [(3, 3, 3), (3, 4, 4), (5, 5, 5), (5, 5, 5), (5, 7, 7), *[(8, 8, 8)] * 3, (8, 8, 11)]
    blocks += [*[(12, 12, 12)] * 2, (12, 14, 14), *[(15, 15, 15)] * 2, (15, 15, 17)]
    for expand, depthwise, project in blocks:
        y = graph.convs(x, f"block{expand}_expand", f"block{depthwise}_depthwise")
        x = graph.conv(f"block{project}_project", y, residual=x)
    return graph.conv("conv_last", x)


NETWORKS: dict[str, Callable[[Graph, str], str]] = {
    "AlexNet": alexnet,
    "VGG-16": vgg16,
    "ResNet-50 v1": resnet50,
    "GoogLeNet": googlenet,
    "MobileNet-V2": mobilenet_v2,
}


def exported_model(name: str, layers: Mapping[str, ConvLayer], constants: Mapping[str, Array]) -> bytes:
    """One of `NETWORKS` as an ONNX model: an input "image", and one output.

    Parameters
    ----------
    name : str
    layers, constants : mappings
        As `onnx_model` takes them. A layer that repeats is there as often, as `NAME.0`, `NAME.1` and so on.

    Returns
    -------
    bytes

    Raises
    ------
    ValueError
        When the network has no place for one of the layers.
    """
    import onnx

    graph = Graph(layers)
    last = NETWORKS[name](graph, "image")
    if graph.left:
        raise ValueError(f"{name}: expected the layers of the network, got {', '.join(graph.left)} as well")
    model = onnx.load_model_from_string(onnx_model(layers, constants))
    parts: dict[str, list[Any]] = {}
    for node in model.graph.node:
        parts.setdefault(node.output[0].rpartition(".")[0], []).append(node)
        node.input[:] = [graph.wires.get(value, value) for value in node.input]
    nodes = [node for step in graph.nodes for node in (parts[step] if isinstance(step, str) else [step])]
    values = [("image", next(iter(layers.values())).x_shape), (last, None)]
    image, features = (onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, to) for value, to in values)
    inputs = [image, *(value for value in model.graph.input if value.name not in graph.wires)]
    for field, content in (("node", nodes), ("input", inputs), ("output", [features])):
        model.graph.ClearField(field)
        getattr(model.graph, field).extend(content)
    return bytes(onnx.shape_inference.infer_shapes(model, strict_mode=True).SerializeToString())


def exported_networks(
    name: str, problems: Mapping[str, Problem], setting: Setting
) -> dict[str, tuple[Prepared, float]]:
    """A network in ONNX Runtime, and in autoconv, which tunes it as a whole first.

    Parameters
    ----------
    name : str
        Of `NETWORKS`.
    problems : mapping of str to Problem
    setting : Setting

    Returns
    -------
    dict
        By contestant, a run and how much of it is convolutions, their epilogues and changes of layout, as a profile of
        each node says.
    """
    constants = dict(item for copy, problem in problems.items() for item in problem.operands(copy)[1].items())
    model = exported_model(name, {copy: problem.layer for copy, problem in problems.items()}, constants)
    image = next(iter(problems.values())).a
    return {OURS: _in_autoconv(model, image, setting), "onnxruntime": _in_onnxruntime(model, image, setting)}


def _in_autoconv(model: bytes, image: Array, setting: Setting) -> tuple[Prepared, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        path.write_bytes(model)
        net = load(path, device=setting.device, exact=setting.exact)
    net.tune("hybrid", isolate=setting.isolate)
    spent = [(step.operator.split()[0], step.seconds) for step in net.profile(image, repeat=PROFILED)]
    return Prepared(lambda: net.run(image)), convolution_share(spent)


def _in_onnxruntime(model: bytes, image: Array, setting: Setting) -> tuple[Prepared, float]:
    arrays = {"image": image}
    with tempfile.TemporaryDirectory() as folder:
        profiled = model_session(model, setting.device.threads, str(Path(folder, "profile")))
        wait_until_idle()
        for _ in range(1 + PROFILED):
            profiled.run(None, arrays)
        events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
    session = model_session(model, setting.device.threads)
    binding = bound_arrays(session, arrays, {})
    binding.bind_output(session.get_outputs()[0].name)
    prepared = Prepared(lambda: session.run_with_iobinding(binding), lambda _: binding.get_outputs()[0].numpy())
    return prepared, convolution_share(spent_in_onnxruntime(events))


def spent_in_onnxruntime(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """The operators of a profile, and the median of what each node took after its first run."""
    spent: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"])
    return [(operator, statistics.median(times[1:] or times)) for (operator, _), times in spent.items()]


def convolution_share(spent: list[tuple[str, float]]) -> float:
    """What part of the operators' time is not spent in `OTHERS`."""
    return 1 - sum(time for operator, time in spent if operator in OTHERS) / sum(time for _, time in spent)
