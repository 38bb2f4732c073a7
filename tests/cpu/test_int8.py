"""`int8` and `numpy.int8`: equal to the definition, whatever multiplies the words."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import integers
import numpy as np
import pytest
from assembly import assembly
from guards import run_guarded, some, some_runnable
from integers import INSTRUCTIONS, check, device_for
from layers import EDGES, edge
from vectors import INSTRUCTION_SETS

from autoconv.algorithm import Candidate
from autoconv.common.epilogue.quantization import Quantization
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.int8.algorithm import Int8, products
from autoconv.cpu.int8.depthwise import Int8Depthwise
from autoconv.cpu.int8.geometry import Panel, cut_of
from autoconv.cpu.int8.kernels import emit
from autoconv.cpu.numpy.integer import NumpyInteger
from autoconv.cpu.pool import Entry
from autoconv.layer import LAYOUTS, ConvLayer

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

launch = Entry.__call__
BASE = {"N": 2, "C": 8, "H": 9, "W": 11, "K": 12, "R": 3, "S": 3, "padding": 1}
CASES: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "few channels": BASE | {"C": 3, "K": 5},
    "strided, many channels": BASE | {"C": 70, "K": 40, "stride": 2},
    "1x1": BASE | {"R": 1, "S": 1, "padding": 0, "C": 33, "K": 17},
    "1x1, strided": BASE | {"R": 1, "S": 1, "padding": 0, "stride": 2},
    "dilated, lopsided": BASE | {"R": 5, "dilation": (1, 2), "padding": ((2, 1), (3, 0)), "stride": (2, 3)},
    "grouped": BASE | {"groups": 4},
    "depthwise": BASE | {"C": 12, "groups": 12},
    "more padding than image": BASE | {"H": 3, "W": 2, "padding": 3, "C": 64},
    "padding alone": BASE | {"H": 2, "W": 2, "R": 2, "S": 2, "padding": 1, "dilation": 3},
    "a single column": BASE | {"W": 1, "S": 1, "padding": 0},
}
TYPES = list(itertools.product(("uint8", "int8"), ("int32", "uint8", "int8", "float32")))
WAYS = [
    (isa, product)
    for isa in INSTRUCTION_SETS
    for product in ("tdpbusd", "vpdpbusd", "pmaddwd", "plain")
    if product in products(device_for(isa, product))
]


@pytest.mark.parametrize("types", TYPES, ids=" to ".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_every_way_gives_what_the_definition_says(
    way: tuple[str, str], case: str, layout: str, types: tuple[str, str]
) -> None:
    activation = "relu" if len(case) % 2 else None
    layer = ConvLayer(**CASES[case], layout=layout, dtype=types[0], output_dtype=types[1], activation=activation)
    check(layer, device_for(*way), Int8(), {"product": way[1], "NV": 2, "TP": 3, "strip": 40})


@pytest.mark.parametrize("types", TYPES, ids=" to ".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_numpy_gives_what_the_definition_says(case: str, layout: str, types: tuple[str, str]) -> None:
    layer = ConvLayer(**CASES[case], layout=layout, dtype=types[0], output_dtype=types[1], activation="relu")
    check(layer, CPU(threads=2, instruction_set="generic"), NumpyInteger(), {})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, layout: str) -> None:
    layer, device = edge(name, dtype="uint8", layout=layout), CPU.current()
    (candidate,) = some_runnable(Int8(), layer, device, 1)
    check(layer, device, Int8(), dict(candidate.params))


@pytest.mark.parametrize("product", ["pmaddwd", "plain", "tdpbusd"])
def test_the_largest_numbers_do_not_saturate_on_their_way(product: str) -> None:
    layer = ConvLayer(N=1, C=64, H=4, W=4, K=3, R=3, S=3, dtype="uint8")
    device = device_for("avx2" if "avx2" in INSTRUCTION_SETS else INSTRUCTION_SETS[-1], product)
    x = np.full(layer.x_shape, 255, np.uint8)
    w = np.full(layer.w_shape, 127, np.int8)
    w[1] = -128
    w[2, ::2] = -128
    params = {"product": product, "NV": 1, "TP": 4, "strip": 64}
    operand = Quantization().operand(layer)
    got = run_guarded(Int8(), layer, device, Candidate("int8", tuple(params.items())), (x, w, operand, None), "after")
    np.testing.assert_array_equal(got, integers.output(layer, integers.sums(layer, x, w)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [Int8(), Int8Depthwise(), NumpyInteger()], ids=lambda family: family.name)
def test_memory_is_as_the_kernel_says_and_whose_threads_it_runs_on(
    family: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[None] = []
    monkeypatch.setattr(Entry, "__call__", lambda *arguments: launched.append(launch(*arguments)))
    device, layer = CPU.current(), ConvLayer(**BASE, dtype="uint8", layout=layout)
    if family.groupings == ("depthwise",):
        layer = layer.replace(K=layer.C, groups=layer.C, stride=2)
    candidates = family.all(layer, device)
    assert candidates
    for candidate in some(candidates, 3):
        assert family.why_not(layer, device, candidate.params) == []
        kernel = family.build(layer, device, candidate.params)
        assert kernel.workspace_bytes == family.workspace_bytes(layer, device, candidate.params)
        assert kernel.packed_bytes == family.packed_bytes(layer, device, candidate.params)
        assert family.estimate(layer, device, candidate.params) > 0
    check(layer, device, family, dict(candidates[0].params))
    assert bool(launched) == (family.pool == "autoconv")


@pytest.mark.parametrize(
    ("processor", "instruction_set", "product", "wanted"),
    [*INSTRUCTIONS, ("sapphirerapids", "avx512", "tdpbusd", r"tdpbusd\s+%tmm")],
)
def test_each_product_is_one_instruction(processor: str, instruction_set: str, product: str, wanted: str) -> None:
    layer = ConvLayer(N=1, C=64, H=8, W=8, K=64, R=3, S=3, dtype="uint8", layout="NHWC", output_dtype="uint8")
    panel = Panel(layer, cut_of(layer, 2, instruction_set, product, 2, 4, 64))
    found = assembly(emit(instruction_set, "amx" if product == "tdpbusd" else None, panel, 2), processor)
    assert re.search(wanted, found)
    assert "vpmaddubsw" not in found  # its sums of two products saturate


def test_a_processor_without_an_instruction_says_so() -> None:
    device = CPU(threads=2, instruction_set="generic")
    layer = ConvLayer(**BASE, dtype="uint8")
    params = {"product": "tdpbusd", "NV": 2, "TP": 3, "strip": 40}
    (reason,) = Int8().why_not(layer, device, params)
    assert reason == f"product=tdpbusd: expected {' or '.join(products(device))}, as this process may use"
    emulated = replace(device, matrix_unit="emulated")
    assert products(emulated)[0] == "tdpbusd"
    assert Int8().why_not(layer, emulated, params) == []
    assert len(Int8().why_not(layer, device, params | {"product": "plain", "NV": 0, "TP": -1})) == 2
    assert Int8().why_not(layer, device, params | {"product": "plain", "TP": 16}) == [
        "NV * TP=32: expected at most the 16 registers"
    ]


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_other_types_and_directions_are_refused(direction: str) -> None:
    layer = ConvLayer(**BASE, direction=direction)
    for family in (Int8(), NumpyInteger()):
        assert [reason.partition(":")[0] for reason in family.why_not(layer, CPU.current(), {})] == [
            "direction",
            "dtype",
        ]
