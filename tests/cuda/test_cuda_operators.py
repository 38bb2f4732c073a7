"""What lies between layers on a GPU: every operator's kernels on the emulator, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simt.cases import DEVICE, calls_of, computed, operator_checker, units_of
from simt.emulator import MISSING, Emulated

from autoconv.bench.gpu.networks import ERROR, NOT_FINITE, OPERATORS, difference, drawn, graph_of
from autoconv.cuda.codegen.source import GENERATED_SHAPES, file_text
from autoconv.cuda.operators import units
from autoconv.cuda.operators.elementwise import elementwise
from autoconv.errors import PlanError
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Elementwise, MatMul, Softmax, TensorType
from autoconv.networks.reference import evaluate

emulated = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

CASES = [(name, special) for name in OPERATORS for special in (False, True)[: 1 + (name in NOT_FINITE)]]


@emulated
@pytest.mark.parametrize(("name", "special"), CASES)
def test_operators_agree_with_numpy(name: str, special: bool) -> None:
    inputs = drawn(graph_of(name), special)
    assert not special or not all(np.isfinite(array).all() for array in inputs.values())
    operator_checker(name, special)(DEVICE)


@emulated
@pytest.mark.stress
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("name", [name for name in OPERATORS if units_of(name)])
def test_operators_are_clean_under_sanitizers(name: str, sanitizer: str) -> None:
    operator_checker(name)(Emulated(capability=90, sanitizer=sanitizer, schedule=5))


@emulated
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_a_row_reaches_its_softmax(value: float) -> None:
    graph = Graph("softmax")
    graph.add_input("x0", TensorType((3, 5)))
    graph.outputs["y"] = graph.add("y", Softmax(1), "x0")
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    x[1, 2] = value
    with np.errstate(all="ignore"):
        expected = evaluate(graph, {"x0": x})["y"]
    assert difference(computed(graph, {"x0": x}, DEVICE), expected) <= ERROR


def test_the_difference_sees_what_is_not_finite() -> None:
    expected = np.array([1.0, np.nan, np.inf])
    assert difference(np.array([1.5, np.nan, np.inf]), expected) == 0.5
    for wrong in ([1.0, 2.0, np.inf], [np.nan, np.nan, np.inf], [1.0, np.nan, -np.inf], [1.0, np.nan]):
        assert difference(np.array(wrong), expected) == np.inf


def test_positions_beyond_32_bits_are_of_64() -> None:
    small, large = (units.pool("max", n, 1, (4, 4), (2, 2), (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), False)
                    for n in (1 << 20, 1 << 26))  # fmt: skip
    assert "using Offset = int;" in small.text
    assert "using Offset = long long;" in large.text
    for rows in (units.softmax((2**27, 4), 1), units.reduction("sum", (2**27, 4), (1,)),
                 units.normalization((2**27, 4), 1, 1e-5, True, None, 1)):  # fmt: skip
        assert "using Offset = long long;" in rows.text  # of short rows there are more lanes than elements
    assert "using Offset = int;" in units.softmax((2**24, 32), 1).text
    strided = elementwise(0, (2, 3), [(3, 1), (1 << 30, 1)], ["int8", "int8"])
    assert "using Offset = long long;" in strided.text


def test_the_example_for_editors_has_what_is_generated() -> None:
    """A name that a kernel is compiled with stands in the text that editors see in its place."""
    example = file_text(GENERATED_SHAPES)
    for name in OPERATORS:
        for unit in units_of(name):
            generated = unit.text.split(f'#line 1 "{GENERATED_SHAPES}"\n')[1].split("\n#line")[0]
            for line in generated.splitlines():
                word, *rest = line.split()
                declared = rest[1] if word == "constexpr" else rest[0] if word == "using" else ""
                assert declared in example, line


@pytest.mark.parametrize(
    ("operator", "types", "said"),
    [
        (Elementwise(("exp", 0)), [TensorType((2,), "float64")], "node 'y', exp of float64 (2,): no kernel for a GPU"),
        (Elementwise(("add", 0, 1)), [TensorType((0, 2)), TensorType((0, 2))], "no kernel for a GPU"),
        (Elementwise(("add", ("add", 0, ("add", 1, 2)), ("add", 3, ("add", 4, 5)))), [TensorType((2,))] * 6, "no kern"),
        (MatMul(), [TensorType((2, 1, 3, 4)), TensorType((1, 2, 4, 3))], "MatMul of"),
    ],
)
def test_what_has_no_kernel_is_named(operator: Any, types: list[TensorType], said: str) -> None:
    graph = Graph("net")
    names = [graph.add_input(f"x{n}", found) for n, found in enumerate(types)]
    graph.outputs["y"] = graph.add("y", operator, *names)
    with pytest.raises(PlanError, match="no kernel for a GPU") as raised:
        calls_of(graph, DEVICE)
    assert said in str(raised.value)
