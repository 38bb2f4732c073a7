"""MNN's convolution."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoconv.bench.baselines.base import Baseline, Prepared, Problem
from autoconv.cpu.device import CPU
from autoconv.vendors.onnxruntime import onnx_model


def _prepare(problem: Problem, device: CPU, constant: bool, fresh: bool) -> Prepared:
    with silent():
        import MNN.expr

        first, own = MNN.expr.NCHW, MNN.expr.NC4HW4
        inputs, constants = problem.operands("conv")
        module = converted(onnx_model({"conv": problem.layer}, constants), [*inputs], ["conv.y"], device.threads)
        variables = [MNN.expr.convert(MNN.expr.const(x, list(x.shape), first), own) for x in inputs.values()]
    return Prepared(lambda: module.forward(variables)[0], lambda y: MNN.expr.convert(y, first).read())


def converted(model: bytes, inputs: list[str], outputs: list[str], threads: int) -> Any:
    """An ONNX model as a module that takes its inputs in MNN's own format."""
    import MNN.nn
    from _tools import mnnconvert  # not by MNN.tools, whose import installs packages that report on the user

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "model.mnn")
        source.write_bytes(model)
        mnnconvert(["", "-f", "ONNX", "--modelFile", str(source), "--MNNModel", str(target), "--keepInputFormat=0"])
        settings = {"backend": "CPU", "numThread": threads, "precision": "high"}
        runtime = MNN.nn.create_runtime_manager((settings,))
        return MNN.nn.load_module_from_file(str(target), inputs, outputs, runtime_manager=runtime)


@contextmanager
def silent() -> Iterator[None]:
    """Nothing on standard output, to which MNN tells from C++ what it does."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


BASELINES = (Baseline("mnn", "MNN", ("MNN", "onnx"), _prepare, varying=False, tensors="blocks of channels"),)
