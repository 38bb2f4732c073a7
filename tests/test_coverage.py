"""Which family of generated kernels runs which kind of layer: a committed table, held to what is true.

`python tests/test_coverage.py` writes the table anew, and the summary of it in the README.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import operands

from autoconv import reference
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu import ALGORITHMS
from autoconv.cpu.device import CPU
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer

TABLE = Path(__file__).with_name("coverage.json")
README = Path(__file__).parent.parent / "README.md"
MARK = "<!-- coverage: written by tests/test_coverage.py -->"
FAMILIES = {a.name: a for a in ALGORITHMS if a.vendor is None and not a.name.startswith("numpy.")}
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


def runnable(family: Algorithm, cell: Cell) -> list[tuple[ConvLayer, Candidate]]:
    """The candidates of the family that take a layer of this kind."""
    device = CPU(threads=2, instruction_set="avx512")  # so that the table is the same on every machine
    found = []
    for filter_size in FILTERS if cell[-1] == 1 else FILTERS[1:]:
        layer = layer_of(cell, filter_size)
        for candidate in family.all(layer, device):
            reasons = family.why_not(layer, device, candidate.params)
            assert all(isinstance(reason, str) and reason for reason in reasons)
            if not reasons:
                found.append((layer, candidate))
    return found


def text(cell: Cell) -> str:
    direction, dtype, layout, groups, dilation = cell
    return f"{direction} {dtype} {layout} {groups}{' dilated' if dilation > 1 else ''}"


def table() -> dict[str, list[str]]:
    """The kinds of layer that each family takes."""
    return {name: [text(cell) for cell in CELLS if runnable(family, cell)] for name, family in FAMILIES.items()}


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


def test_the_committed_table_is_true() -> None:
    assert json.loads(TABLE.read_text()) == table()


def test_the_readme_holds_its_summary() -> None:
    assert summary(json.loads(TABLE.read_text())) in README.read_text()


@pytest.mark.parametrize("cell", CELLS, ids=text)
def test_a_generated_kernel_runs_every_kind_of_layer(cell: Cell) -> None:
    """The first family that takes it gives the right answer; so nothing is left to the NumPy floor alone."""
    device = CPU.current()
    family, (layer, candidate) = next(
        (family, (layer, candidate))
        for family in FAMILIES.values()
        for layer, _ in runnable(family, cell)
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


if __name__ == "__main__":
    cells = table()
    TABLE.write_text(json.dumps(cells, indent=1) + "\n")
    block = re.compile(rf"{re.escape(MARK)}\n.*?\n\n", re.DOTALL)
    README.write_text(block.sub(f"{MARK}\n{summary(cells)}\n\n", README.read_text()))
