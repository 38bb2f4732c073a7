"""Operators that nothing here computes: those of ONNX, run by ONNX Runtime or the reference that comes with `onnx`."""

from __future__ import annotations

import base64
import functools
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoconv.common.text import one_line
from autoconv.common.types import DTYPES
from autoconv.errors import ConfigError
from autoconv.networks.operators.base import Operator, TensorType
from autoconv.vendors.onnxruntime import model_session

_NAMES = {"float": "float32", "double": "float64"}  # of types in ONNX Runtime, where they are not NumPy's
_RUNTIME = "ONNX Runtime"


@dataclass(frozen=True)
class Runner:
    """What runs a model; and of which arrays, as the model itself says."""

    run: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
    takes: list[TensorType]
    gives: list[TensorType]


@dataclass(frozen=True)
class Foreign(Operator):
    """One output of an operator that nothing here computes, and that another library runs.

    Parameters
    ----------
    operator : str
        The library's name of it.
    output : int
        Which of its outputs this is.
    takes : tuple of (shape, dtype)
        What its inputs are.
    shape : tuple of int
    dtype : str
        What the output is.
    """

    operator: str
    output: int
    takes: tuple[tuple[tuple[int, ...], str], ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> str:
        return self.operator

    @property
    def call(self) -> Hashable:
        """What is the same of all outputs of a call."""
        return replace(self, output=0, shape=(), dtype="")

    @property
    @abstractmethod
    def by(self) -> str:
        """What runs it."""

    @abstractmethod
    def runner(self, threads: int) -> Runner:
        """What runs it on at most so many threads, made ready; PyTorch runs all on as many as it is told to use."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        expected = [TensorType(shape, dtype) for shape, dtype in self.takes]
        if list(inputs) != expected:
            raise ConfigError(f"expected {listed(expected)}")
        runner, stated = self.runner(1), TensorType(self.shape, self.dtype)
        if runner.takes != expected:
            raise ConfigError(f"expected a model of these inputs, got one of {listed(runner.takes)}")
        if stated not in runner.gives[self.output :][:1]:
            raise ConfigError(
                f"expected an output of its model, which gives {listed(runner.gives)}, got {self.output}: {stated}"
            )
        return stated

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        return np.asarray(self.runner(1).run(inputs)[self.output])


@dataclass(frozen=True)
class ForeignOnnx(Foreign):
    """A node of ONNX, kept as a model of that node alone.

    Parameters
    ----------
    model : str
        The model, serialized, in base64. Its inputs are those of the node that are computed, in their order.
    """

    model: str = field(repr=False)

    @property
    def by(self) -> str:
        """ONNX Runtime, unless it is not installed, or has no such operator or type."""
        return self._found[0]

    def runner(self, threads: int) -> Runner:
        by, found = self._found
        several = _session(self.model, threads) if by == _RUNTIME and threads > 1 else None
        return several or found

    @functools.cached_property
    def _found(self) -> tuple[str, Runner]:
        installed = [package for package in ("onnxruntime", "onnx") if importlib.util.find_spec(package) is not None]
        own = all(np.dtype(dtype).isbuiltin == 1 for dtype in (self.dtype, *(dtype for _, dtype in self.takes)))
        if "onnxruntime" in installed and own:  # in Python it has NumPy's types
            session = _session(self.model, 1)
            if session is not None:
                return _RUNTIME, session
        if "onnx" in installed:
            return "onnx.reference", _reference(self.model)
        got = "ONNX Runtime alone, which does not run it" if installed else "neither"
        raise ConfigError(f"{self.operator}: no kernel here: expected onnxruntime or onnx to be installed, got {got}")

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        # In the types that the model says, as it also has constants within it, which are of no others.
        typed = zip(inputs, self.takes, strict=True)
        return super().evaluate(*(a.astype(DTYPES.get(dtype, dtype), copy=False) for a, (_, dtype) in typed))


def listed(types: Sequence[TensorType]) -> str:
    """Types as messages name them."""
    return ", ".join(map(str, types)) or "none"


@functools.lru_cache(maxsize=256)
def _session(model: str, threads: int) -> Runner | None:
    """ONNX Runtime on so many threads, with the model made ready for all its runs; None where it does not take it."""
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    refusals = (
        *(errors.Fail, errors.InvalidArgument, errors.InvalidGraph, errors.InvalidProtobuf, errors.NotImplemented),
        errors.RuntimeException,  # of older ones, for attributes that a kernel does not take
    )
    try:
        session = model_session(base64.b64decode(model), threads, spinning=False, whole=True)
    except refusals:
        return None
    inputs = session.get_inputs()
    names = [found.name for found in inputs]

    def type_of(found: Any) -> TensorType:
        name = found.type.removeprefix("tensor(").removesuffix(")")
        return TensorType(tuple(found.shape), _NAMES.get(name, name))

    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        given = (np.asarray(array, order="C") for array in arrays)  # which leaves a scalar one
        found: Sequence[np.ndarray] = session.run(None, dict(zip(names, given, strict=True)))
        return found

    return Runner(
        run,
        [*map(type_of, inputs)],
        [*map(type_of, session.get_outputs())],
    )


@functools.lru_cache(maxsize=256)
def _reference(model: str) -> Runner:
    """The reference."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        read = onnx.load_from_string(base64.b64decode(model))
        evaluator = ReferenceEvaluator(read)
    except Exception as error:  # of the package, for what is no model
        raise ConfigError(f"expected an ONNX model of this node: {one_line(error)}") from None

    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        found: Any = evaluator.run(None, dict(zip(evaluator.input_names, arrays, strict=True)))
        return list(found)

    def type_of(info: Any) -> TensorType:
        tensor = info.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        return TensorType(tuple(int(dim.dim_value) for dim in tensor.shape.dim), dtype.name)

    return Runner(run, [*map(type_of, read.graph.input)], [*map(type_of, read.graph.output)])
