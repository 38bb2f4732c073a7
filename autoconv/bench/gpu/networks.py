"""What networks are made of besides layers, and whole networks: what runs on the tests' emulator, and on a GPU.

Operators are held to NumPy in float64, networks to what the CPU answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autoconv.common import code_hash
from autoconv.common.arrays import CHANNELS_LAST, host
from autoconv.cuda.operators import units
from autoconv.device import Device
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    LRN,
    Concat,
    Conv,
    ConvTranspose,
    Elementwise,
    MatMul,
    Normalization,
    Operator,
    Pad,
    Pool,
    Reduce,
    Reshape,
    Resize,
    Slice,
    Softmax,
    TensorType,
    Transpose,
)
from autoconv.networks.operators.quantized import DEQUANTIZE, quantize
from autoconv.networks.reference import evaluate
from autoconv.networks.run import cuda_instance
from autoconv.registry import this_device

ERROR = 2e-6  # of an operator, relative to its largest output; networks may err more, as their layers do
ALIKE = 1e-4  # what the answers of two devices may differ by, relative to the largest
X = (2, 6, 9, 8)
_ARITHMETIC = ("sub", ("mul", 0, 1), ("div", ("neg", 0), ("add", ("abs", 2), 1.5)))
_ROOTS = ("add", ("sqrt", ("abs", 0)), ("pow", ("abs", 0), 1.25))
_LOGARITHM = ("log", ("add", ("exp", ("min", 0, 2.0)), 0.5))
_CURVES = ("add", ("erf", 0), ("add", ("tanh", 0), ("sigmoid", 0)))
_WINDOW: dict[str, Any] = {"window": (3, 2), "stride": (2, 4), "padding": ((1, 0), (1, 1)), "dilation": (2, 1)}

# An operator, and the shapes of its inputs, of float32 where nothing else is said.
OPERATORS: Mapping[str, tuple[Operator, Sequence[tuple[int, ...] | TensorType]]] = {
    "arithmetic of three shapes": (Elementwise(_ARITHMETIC), [X, (6, 1, 1), (2, 1, 9, 8)]),
    "roots and powers": (Elementwise(("sub", _ROOTS, _LOGARITHM)), [X]),
    "curves": (Elementwise(_CURVES), [X]),
    "relu": (Elementwise(("relu", 0)), [X]),
    "clip": (Elementwise(("max", ("min", 0, 1.0), -0.75)), [X]),
    "prelu": (Elementwise(("prelu", 0, 1)), [X, (6, 1, 1)]),
    "five inputs": (Elementwise(("add", ("add", 0, 1), ("add", 2, ("add", 3, 4)))), [(3, 5)] * 5),
    "constant": (Elementwise(("mul", ("mul", 0, 0.0), 2.0)), [(7,)]),
    "quantize": (quantize("uint8"), [(5, 60), (), ()]),
    "quantize by rows": (quantize("int8"), [(5, 60), (5, 1), (5, 1)]),
    "dequantize": (DEQUANTIZE, [TensorType((5, 60), "int8"), (), ()]),
    "largest of windows": (Pool(reduction="max", **_WINDOW), [X]),
    "largest of windows, overhanging": (Pool(reduction="max", window=(3, 3), stride=(2, 2), overhang=(0, 1)), [X]),
    "largest of windows, NHWC": (Pool(reduction="max", layout="NHWC", **_WINDOW), [X]),
    "mean of windows": (Pool(reduction="mean", **_WINDOW), [X]),
    "mean of padded windows": (Pool(reduction="mean", include_padding=True, overhang=(1, 0), **_WINDOW), [X]),
    "mean of windows, NHWC": (Pool(reduction="mean", layout="NHWC", **_WINDOW), [X]),
    "mean of images": (Reduce("mean", (2, 3)), [X]),
    "mean of images, NHWC": (Reduce("mean", (1, 2)), [X]),
    "sum of all": (Reduce("sum", (0, 1, 2, 3)), [X]),
    "largest of the first axis": (Reduce("max", (0,)), [X]),
    "largest of rows": (Reduce("max", (1, 3)), [X]),
    "softmax of rows": (Softmax(1), [(3, 1000)]),
    "softmax across channels": (Softmax(1), [X]),
    "normalised rows": (Normalization(axis=1, epsilon=1e-5), [(3, 1000)]),
    "normalised by the root of squares": (
        Normalization(axis=2, epsilon=1e-2, centred=False, affine="elements"),
        [(2, 5, 70), (70,), (70,)],
    ),
    "normalised images": (Normalization(axis=2, epsilon=1e-5, affine="rows"), [X, (6,), (6,)]),
    "lrn": (LRN(size=5, alpha=0.3, beta=0.75, bias=1.5), [X]),
    "lrn, even": (LRN(size=4, alpha=0.3, beta=0.5, bias=1.0), [(2, 3, 7)]),
    "resize": (Resize(2, ((0, 1), (1, 2), (8, 8), (4, 0)), ((0.25, 0.75), (1.0, 0.0), (0.5, 0.5), (-0.5, 1.5))), [X]),
    "pad": (Pad((0, 0, 1, 2), (0, 0, 2, 0), -1.5), [X]),
    "pad integers": (Pad((1, 0), (0, 2), -3.0), [TensorType((4, 5), "int64")]),
    "slice": (Slice((1, 5, 8, 1), (1, 3, 3, 3), (1, -2, -4, 3)), [X]),
    "slice of bytes": (Slice((0, 1), (3, 4), (1, 2)), [TensorType((3, 9), "int8")]),
    "concatenation": (Concat(1), [X, (2, 1, 9, 8), (2, 3, 9, 8)]),
    "concatenation of the first axis": (Concat(0), [(1, 5), (2, 5), (1, 5)]),
    "transposed matrices": (Transpose((0, 2, 1)), [(2, 35, 67)]),
    "to NHWC": (Transpose(CHANNELS_LAST), [(2, 33, 5, 7)]),
    "transposed dimensions": (Transpose((3, 0, 2, 1)), [X]),
    "transposed halves": (Transpose((1, 0)), [TensorType((40, 33), "float16")]),
    "product of matrices": (MatMul(), [(2, 3, 5, 7), (2, 3, 7, 4)]),
    "product of shared matrices": (
        MatMul(transposed=True, bias=True, residual=True, activation="clip:0:6"),
        [(3, 5, 7), (4, 7), (4,), (3, 5, 4)],
    ),
}
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, math.nan, math.inf)
NOT_FINITE = (
    "relu",
    "clip",
    "prelu",
    "largest of windows",
    "mean of windows",
    "largest of rows",
    "mean of images",
    "pad",
    "slice",
)


def graph_of(name: str) -> Graph:
    """A network of one of the operators."""
    operator, shapes = OPERATORS[name]
    graph = Graph(name)
    for n, shape in enumerate(shapes):
        graph.add_input(f"x{n}", shape if isinstance(shape, TensorType) else TensorType(shape))
    graph.outputs["y"] = graph.add("y", operator, *graph.inputs)
    return graph


def drawn(graph: Graph, not_finite: bool = False) -> dict[str, np.ndarray]:
    """Inputs of a network: random numbers, some of them infinite or NaN where that is wanted; a scalar is a scale."""
    rng, found = np.random.default_rng(0), {}
    for name, wanted in graph.inputs.items():
        values: np.ndarray
        if np.dtype(wanted.dtype).kind == "i":
            values = rng.integers(-100, 100, wanted.shape)
        else:
            values = rng.standard_normal(wanted.shape) if wanted.shape else np.asarray(0.005)
        if not_finite:
            some = values.reshape(-1)[:: -(-values.size // len(SPECIAL))]
            some[:] = SPECIAL[: some.size]
        found[name] = values.astype(wanted.dtype)
    return found


def difference(found: Any, expected: np.ndarray) -> float:
    """The largest, relative to the largest number expected; infinite where what is no number stands elsewhere."""
    found = np.asarray(found, np.float64)
    finite = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return math.inf
    if not np.isfinite(found[finite]).all():
        return math.inf
    largest = np.abs(expected[finite]).max(initial=0.0)
    return float(np.abs(found[finite] - expected[finite]).max(initial=0.0) / (largest or 1.0))


class _Maker:
    """Writes a network, with filters drawn at random and scaled by their fan-in."""

    def __init__(self, name: str, *shape: int) -> None:
        self.graph = Graph(name)
        self.x = self.graph.add_input("x", TensorType(shape))
        self._rng = np.random.default_rng(0)

    def constant(self, *shape: int, gain: float = 2.0) -> str:
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 100
        values = self._rng.standard_normal(shape) * math.sqrt(gain / fan_in)
        return self.graph.add_constant("c", values.astype(np.float32))

    def apply(self, expression: Any, *inputs: str) -> str:
        return self.graph.add("f", Elementwise(expression), *inputs)

    def conv(self, x: str, filters: int, size: int = 3, stride: int = 1, groups: int = 1, gain: float = 2.0) -> str:
        """A convolution of the same extents over the stride, with a bias."""
        before, after = (size - 1) // 2, size // 2
        operator = Conv(stride=(stride, stride), padding=((before, after), (before, after)), groups=groups)
        channels = self.graph.types[x].shape[1]
        w = self.constant(filters, channels // groups, size, size, gain=gain)
        return self.apply(("add", 0, 1), self.graph.add("conv", operator, x, w), self.constant(filters, 1, 1))

    def relu(self, x: str) -> str:
        return self.apply(("relu", 0), x)

    def scores(self, x: str, classes: int) -> Graph:
        """The end: the average over the image, a fully connected layer, and softmax."""
        N, channels = self.graph.types[x].shape[:2]
        rows = self.graph.add("rows", Reshape((N, channels)), self.graph.add("mean", Reduce("mean", (2, 3)), x))
        y = self.graph.add("gemm", MatMul(transposed=True), rows, self.constant(classes, channels))
        y = self.apply(("add", 0, 1), y, self.constant(classes))
        self.graph.outputs["scores"] = self.graph.add("scores", Softmax(1), y)
        return self.graph


def made(batch: int = 1) -> Graph:
    """A small network of every kind of operator, whose activations are not all those that kernels apply."""
    m = _Maker("made", batch, 3, 14, 12)
    add = m.graph.add
    x = m.apply(("prelu", 0, 1), m.conv(m.x, 8), m.constant(8, 1, 1))
    x = add("largest", Pool(reduction="max", window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1))), x)
    x = m.relu(m.apply(("add", 0, 1), m.conv(x, 8, gain=0.5), x))
    left = m.apply(("min", ("max", 0, 0.0), 6.0), m.conv(x, 8, groups=8))
    right = m.apply(("mul", 0, ("sigmoid", 0)), m.conv(x, 5, size=1))
    x = add("joined", Concat(1), left, right, add("part", Slice((0, 2, 0, 0), (batch, 3, 7, 6), (1, 1, 1, 1)), x))
    x = add("lrn", LRN(size=5, alpha=0.1, beta=0.75, bias=1.0), x)
    x = add("mean", Pool(reduction="mean", window=(2, 2), include_padding=True, padding=((1, 0), (0, 1))), x)
    x = add("resized", Resize(3, ((0, 1), (2, 3), (4, 5)), ((0.25, 0.75), (0.5, 0.5), (1.0, 0.0))), x)
    x = add("padded", Pad((0, 0, 1, 0), (0, 0, 0, 1), 0.5), x)
    x = add("up", ConvTranspose(stride=(2, 2)), x, m.constant(16, 4, 2, 2))
    m.graph.outputs["turned"] = add("turned", Transpose(CHANNELS_LAST), x)
    return m.scores(x, 10)


def resnet18(batch: int = 1) -> Graph:
    """The extents of ResNet-18, its batch normalisation folded (He, Zhang, Ren and Sun, 2015, table 1)."""
    m = _Maker("resnet18", batch, 3, 224, 224)
    x = m.relu(m.conv(m.x, 64, size=7, stride=2))
    x = m.graph.add("largest", Pool(reduction="max", window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1))), x)
    for stage, block in itertools.product(range(4), range(2)):
        filters, stride = 64 << stage, 2 if stage and not block else 1
        shortcut = x if stride == 1 else m.conv(x, filters, size=1, stride=2, gain=1.0)
        x = m.conv(m.relu(m.conv(x, filters, stride=stride)), filters, gain=0.5)
        x = m.relu(m.apply(("add", 0, 1), x, shortcut))
    return m.scores(x, 1000)


BUILDERS: Mapping[str, Callable[[int], Graph]] = {"made": made, "resnet18": resnet18}


def networks_version() -> str:
    """Of the code that runs networks on a GPU, and of the kernels between layers."""
    return code_hash.version(cuda_instance.__name__) + code_hash.version(units.__name__)


def check_operator(name: str, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
    """What is wrong with an operator as a device computes it in a network, if anything is."""
    graph = graph_of(name)
    net = CompiledNetwork(graph, device, options)
    errors = []
    for not_finite in (False, True) if name in NOT_FINITE else (False,):
        inputs = drawn(graph, not_finite)
        with np.errstate(all="ignore"):
            expected = evaluate(graph, inputs)["y"]
        found = net.run(**{name: device.asarray(array) for name, array in inputs.items()})
        errors.append(difference(host(found), expected))
    return judged(max(errors), ERROR)


def check_network(name: str, batch: int, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
    """A network's answers against those of the CPU: twice, as a graph is launched again on other inputs."""
    graph = BUILDERS[name](batch)
    net = CompiledNetwork(graph, device, options)
    on_cpu = CompiledNetwork(graph, this_device(), options)
    errors = []
    for factor in (1, -2):
        inputs = {name: factor * array for name, array in drawn(graph).items()}
        found = _by_name(graph, net.run(**{name: device.asarray(array) for name, array in inputs.items()}))
        expected = _by_name(graph, on_cpu.run(**inputs))
        errors += [difference(host(found[output]), expected[output].astype(np.float64)) for output in expected]
    made = {name: str(plan.candidate) for name, plan in net.plans.items()}
    return judged(max(errors), ALIKE) | {"candidates": made}


def _by_name(graph: Graph, found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {next(iter(graph.outputs)): found}


def judged(error: float, bound: float) -> dict[str, Any]:
    """An error and its bound as a result, which is a failure where it is larger."""
    found: dict[str, Any] = {"error": error if math.isfinite(error) else "not finite", "bound": bound}
    return found if error <= bound else found | {"failure": f"error {error:.1e}, allowed {bound:.1e}"}
