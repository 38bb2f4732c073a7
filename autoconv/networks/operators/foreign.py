"""Operators of ONNX that nothing here computes, run by ONNX Runtime or by the reference that comes with `onnx`."""

from __future__ import annotations

import base64
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoconv.errors import ConfigError
from autoconv.networks.operators.base import Operator, TensorType

Runner = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Foreign(Operator):
    """One output of a node, kept as an ONNX model of that node alone.

    Parameters
    ----------
    operator : str
        ONNX's name of it.
    model : str
        The model, serialized, in base64. Its inputs are those of the node that are computed, in their order.
    output : int
        Which of the model's outputs this is.
    takes : tuple of (shape, dtype)
        What its inputs are.
    shape : tuple of int
    dtype : str
        What the output is.
    """

    operator: str
    model: str = field(repr=False)
    output: int
    takes: tuple[tuple[tuple[int, ...], str], ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> str:
        return self.operator

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        expected = [TensorType(shape, dtype) for shape, dtype in self.takes]
        if list(inputs) != expected:
            raise ConfigError(f"expected {', '.join(map(str, expected))}")
        return TensorType(self.shape, self.dtype)

    @property
    def by(self) -> str:
        """What runs it: ONNX Runtime, unless it is not installed, or has no such operator or type."""
        installed = [package for package in ("onnxruntime", "onnx") if importlib.util.find_spec(package) is not None]
        own = all(np.dtype(dtype).kind != "V" for dtype in (self.dtype, *(dtype for _, dtype in self.takes)))
        if "onnxruntime" in installed and own and _session(self.model) is not None:  # in Python it has NumPy's types
            return "ONNX Runtime"
        if "onnx" in installed:
            return "onnx.reference"
        got = "ONNX Runtime alone, which does not run it" if installed else "neither"
        raise ConfigError(f"{self.operator}: no kernel here: expected onnxruntime or onnx to be installed, got {got}")

    def evaluate(self, *inputs: np.ndarray) -> np.ndarray:
        typed = all(a.dtype.name == dtype for a, (_, dtype) in zip(inputs, self.takes, strict=True))
        # ONNX Runtime takes no other types; the reference does.
        run = _session(self.model) if typed and self.by == "ONNX Runtime" else None
        return np.asarray((run or _reference(self.model))(inputs)[self.output])


@functools.lru_cache(maxsize=256)
def _session(model: str) -> Runner | None:
    """ONNX Runtime's way to run a model, made once for all its runs; None where it does not take the model."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    try:
        session = onnxruntime.InferenceSession(base64.b64decode(model), providers=["CPUExecutionProvider"])
    except (errors.Fail, errors.InvalidGraph, errors.NotImplemented):
        return None
    names = [found.name for found in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, map(np.ascontiguousarray, arrays), strict=True)))


@functools.lru_cache(maxsize=256)
def _reference(model: str) -> Runner:
    """The reference's."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load_from_string(base64.b64decode(model)))

    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        found: Any = evaluator.run(None, dict(zip(evaluator.input_names, arrays, strict=True)))
        return list(found)

    return run
