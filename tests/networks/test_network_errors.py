"""The error of whole networks against float64, beside ONNX Runtime's: a table of the documentation.

`python tests/networks/test_network_errors.py FOLDER` writes it anew, from models that `autoconv.bench.networks.models`
wrote into the folder, and by what is on record.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoconv.bench.networks.models import LIGHT, NAMES, network
from autoconv.networks.compiled.loading import load
from autoconv.networks.onnx_reader import read
from autoconv.networks.reference import evaluate

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "accuracy.md"
MARK = "<!-- errors of networks: written by tests/networks/test_network_errors.py -->"
INPUTS = 3  # of which the largest error counts
BATCHES = (1, 8)


def before_softmax(model: Any) -> Any:
    """The model without a softmax at its end, which would hide most errors."""
    import onnx

    last, found = model.graph.node[-1], onnx.ModelProto()
    found.CopyFrom(model)
    if last.op_type == "Softmax":
        found.graph.node.pop()
        found.graph.ClearField("output")
        found.graph.output.append(onnx.helper.make_tensor_value_info(last.input[0], onnx.TensorProto.FLOAT, None))
    return found


def errors(model: Any, path: Path, batch: int) -> tuple[float, float]:
    """Ours and ONNX Runtime's, relative to the largest output; the model is kept at `path`."""
    from onnxruntime import InferenceSession

    path.write_bytes(before_softmax(model).SerializeToString())
    graph, net = read(path, batch, None), load(path, batch)
    (name,) = graph.inputs
    session = InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    found = []
    for seed in range(INPUTS):
        x = np.random.default_rng(seed).standard_normal(graph.inputs[name].shape).astype(np.float32)
        (want,) = evaluate(graph, {name: x}).values()
        answers = net.run(x), session.run(None, {session.get_inputs()[0].name: x})[0]
        found.append([float(np.abs(y.reshape(want.shape) - want).max() / np.abs(want).max()) for y in answers])
    ours, theirs = np.max(found, axis=0).tolist()
    return ours, theirs


def table(folder: Path) -> Iterator[str]:
    import onnx

    yield "| network |" + "".join(f" autoconv, batch {batch} | ONNX Runtime | ratio |" for batch in BATCHES)
    yield "|---" * (1 + 3 * len(BATCHES)) + "|"
    for name in NAMES:
        model, path = onnx.load(folder / f"{name}.onnx"), folder / f"{name}.logits.onnx"
        found = (errors(model, path, batch) for batch in BATCHES)
        yield f"| {name} |" + "".join(f" {ours:.1e} | {theirs:.1e} | {ours / theirs:.1f} |" for ours, theirs in found)


@pytest.mark.stress
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", LIGHT)
def test_the_table_of_the_documentation_is_true(name: str, batch: int, tmp_path: Path) -> None:
    """Within the factor by which tiles may differ that are the fastest elsewhere."""
    pytest.importorskip("onnxruntime", reason="NOT CHECKED: onnxruntime is not installed")
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    first = 2 + 3 * BATCHES.index(batch)
    cells = row.split("|")[first : first + 2]
    for found, cell in zip(errors(network(name), tmp_path / "model.onnx", batch), cells, strict=True):
        assert found <= 2 * float(cell)


if __name__ == "__main__":
    block = re.compile(rf"{re.escape(MARK)}\n.*?\n\n", re.DOTALL)
    lines = "\n".join(table(Path(sys.argv[1])))
    PAGE.write_text(block.sub(f"{MARK}\n{lines}\n\n", PAGE.read_text()))
