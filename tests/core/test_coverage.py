"""Which family of kernels runs which kind of layer: a committed table, held to what is true.

`python tests/test_coverage.py` writes the table anew, and the summary of it in the README.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import operands
from simt.cases import check
from simt.emulator import MISSING, Emulated

import autoconv.cpu
import autoconv.cuda
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.tuning import reference

TABLE = Path(__file__).parents[1].joinpath("coverage.json")
README = Path(__file__).parents[2] / "README.md"
MARK = "<!-- coverage: written by tests/test_coverage.py -->"
# not the device at hand: the table is the same on every machine
DEVICES: dict[str, Device] = {"cpu": CPU(threads=2, instruction_set="avx512"), "cuda": Emulated(capability=90)}
FAMILIES = {
    kind: {a.name: a for a in algorithms if a.vendor is None and not a.name.startswith("numpy.")}
    for kind, algorithms in (("cpu", autoconv.cpu.ALGORITHMS), ("cuda", autoconv.cuda.ALGORITHMS))
}
GROUPS = {"dense": 1, "grouped": 2, "depthwise": 16}
DILATIONS = (1, 2)
FILTERS = (1, 3, 5, 11)  # each family has filters it is for; one that it takes is enough

Cell = tuple[str, str, str, str, int]
CELLS: list[Cell] = list(itertools.product(DIRECTIONS, DTYPES, LAYOUTS, GROUPS, DILATIONS))


def layer_of(cell: Cell, filter_size: int) -> ConvLayer:
    direction, dtype, layout, groups, dilation = cell
    return ConvLayer(
        N=2, C=16, H=24, W=25, K=16, R=filter_size, S=filter_size, padding=filter_size // 2, groups=GROUPS[groups],
        dilation=dilation if filter_size > 1 else 1, direction=direction, dtype=dtype, layout=layout,
    )  # fmt: skip


def asked(kind: str, family: Algorithm, cell: Cell) -> Iterator[tuple[ConvLayer, Candidate, list[str]]]:
    """The candidates of the family for layers of this kind, and the reasons against each."""
    for filter_size in FILTERS if cell[-1] == 1 else FILTERS[1:]:
        layer = layer_of(cell, filter_size)
        for candidate in family.all(layer, DEVICES[kind]):
            yield layer, candidate, family.why_not(layer, DEVICES[kind], candidate.params)


def runnable(kind: str, family: Algorithm, cell: Cell) -> Iterator[tuple[ConvLayer, Candidate]]:
    return ((layer, candidate) for layer, candidate, reasons in asked(kind, family, cell) if not reasons)


def text(cell: Cell) -> str:
    direction, dtype, layout, groups, dilation = cell
    return f"{direction} {dtype} {layout} {groups}{' dilated' if dilation > 1 else ''}"


def table(kind: str) -> dict[str, list[str]]:
    """The kinds of layer that each family takes."""
    return {
        name: [text(cell) for cell in CELLS if any(True for _ in runnable(kind, family, cell))]
        for name, family in FAMILIES[kind].items()
    }


def summary(cells: dict[str, list[str]]) -> str:
    """The table in short, for the README: a row for each family and direction."""
    lines = ["| family | direction | types | layouts | groups | dilated |", "|---|---|---|---|---|---|"]
    for family, direction in itertools.product(cells, DIRECTIONS):
        split = [cell.split() for cell in cells[family] if cell.startswith(direction)]
        if not split:
            continue
        columns = [
            ", ".join(v for v in kinds if any(cell[place] == v for cell in split))
            for place, kinds in ((1, DTYPES), (2, LAYOUTS), (3, GROUPS))
        ]
        dilated = "yes" if any(cell[-1] == "dilated" for cell in split) else "no"
        lines.append(f"| `{family}` | {direction} | {' | '.join(columns)} | {dilated} |")
    return "\n".join(lines)


COMMITTED: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())


@pytest.mark.parametrize("kind", DEVICES)
def test_the_committed_table_is_true(kind: str) -> None:
    assert COMMITTED[kind] == table(kind)


def test_the_readme_holds_its_summary() -> None:
    assert summary(COMMITTED["cpu"]) in README.read_text()


def test_every_empty_cell_of_cuda_is_explained() -> None:
    for family, cell in itertools.product(FAMILIES["cuda"].values(), CELLS):
        reasons = [reasons for _, _, reasons in asked("cuda", family, cell)]
        assert reasons, f"{family.name} has no candidate for {text(cell)}"
        assert all(isinstance(reason, str) and reason.strip() for reason in itertools.chain(*reasons))


@pytest.mark.parametrize("cell", CELLS, ids=text)
def test_a_generated_kernel_runs_every_kind_of_layer(cell: Cell) -> None:
    """The first family that takes it gives the right answer; so nothing is left to the NumPy floor alone."""
    device = CPU.current()
    family, (layer, candidate) = next(
        (family, (layer, candidate))
        for family in FAMILIES["cpu"].values()
        for layer, _ in runnable("cpu", family, cell)
        for candidate in family.all(layer, device)
        if not family.why_not(layer, device, candidate.params)
    )
    a, b, _, _ = operands(layer)
    kernel = family.build(layer, device, candidate.params)
    weights: Any = b
    if kernel.packed_bytes:
        weights = device.buffer(kernel.packed_bytes)
        kernel.pack(b, weights)
    out = device.empty(layer.output_shape, layer.numpy_dtype)
    out[...] = np.nan
    kernel.run(a, weights, out, None, None, device.buffer(kernel.workspace_bytes))
    error = reference.error(out, reference.convolve(layer, a, b), reference.magnitude(layer, a, b))
    assert error <= family.bound(layer, candidate.params)


def test_on_cuda_direct_and_a_gemm_take_every_kind_of_layer() -> None:
    for cell in CELLS:
        assert text(cell) in COMMITTED["cuda"]["direct"]
        assert text(cell) in COMMITTED["cuda"]["gemm"]


def test_tensor_cores_take_every_direction_in_nhwc() -> None:
    """With channels of a group a multiple of 8, as layers of the table have them where they are not depthwise."""
    for cell in CELLS:
        _, dtype, layout, groups, _ = cell
        if layout == "NHWC" and groups != "depthwise" and dtype != "float64":
            assert text(cell) in COMMITTED["cuda"]["tensor.tf32" if dtype == "float32" else "tensor"]


TAKEN = [(name, cell) for name, cells in COMMITTED["cuda"].items() for cell in CELLS if text(cell) in cells]


def runs(name: str, cell: Cell) -> None:
    family = FAMILIES["cuda"][name]
    layer, candidate = next(runnable("cuda", family, cell))
    check(Emulated(capability=90), family, layer, candidate.params)


@pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
@pytest.mark.parametrize(("name", "cell"), [t for t in TAKEN if t[0] in ("direct", "gemm")][::23], ids=str)
def test_a_sample_of_the_cuda_table_runs(name: str, cell: Cell) -> None:
    runs(name, cell)


@pytest.mark.stress
@pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
@pytest.mark.parametrize(("name", "cell"), TAKEN, ids=str)
def test_the_whole_cuda_table_runs(name: str, cell: Cell) -> None:
    runs(name, cell)


if __name__ == "__main__":
    cells = {kind: table(kind) for kind in DEVICES}
    TABLE.write_text(json.dumps(cells, indent=1) + "\n")
    block = re.compile(rf"{re.escape(MARK)}\n.*?\n\n", re.DOTALL)
    README.write_text(block.sub(f"{MARK}\n{summary(cells['cpu'])}\n\n", README.read_text()))
