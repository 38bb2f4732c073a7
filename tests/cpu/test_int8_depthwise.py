"""`int8.depthwise`: equal to the definition, whatever multiplies the words, nothing touched outside the arrays."""

from __future__ import annotations

import re
from typing import Any

import integers
import numpy as np
import pytest
from assembly import assembly, functions_of
from guards import run_guarded, some_runnable
from integers import INSTRUCTIONS, check, device_for
from layers import EDGES, edge
from vectors import INSTRUCTION_SETS

from autoconv import plan
from autoconv.algorithm import Candidate
from autoconv.common.epilogue.quantization import Quantization
from autoconv.cpu import pool
from autoconv.cpu.codegen.ir import VECTOR_BYTES, X86
from autoconv.cpu.codegen.words import vector_products
from autoconv.cpu.device import CPU
from autoconv.cpu.int8.algorithm import Int8
from autoconv.cpu.int8.depthwise import Int8Depthwise
from autoconv.cpu.int8.depthwise_geometry import DepthwisePanel
from autoconv.cpu.int8.depthwise_kernels import emit
from autoconv.layer import LAYOUTS, ConvLayer

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")

DEPTHWISE = Int8Depthwise()
BASE = {"N": 2, "C": 19, "H": 11, "W": 9, "R": 3, "S": 3, "padding": 1}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fewer channels than lanes": {"C": 3, "H": 7, "W": 7},
    "channels beyond whole vectors": {"C": 37, "H": 5},
    "strided": {"stride": 2, "H": 16, "W": 35},
    "wide": {"H": 6, "W": 71},
    "5x5, strided across": {"R": 5, "S": 5, "padding": 2, "H": 13, "W": 40, "stride": (1, 2)},
    "7x7, strided down": {"R": 7, "S": 7, "padding": 3, "stride": (3, 1)},
    "stride skips pixels": {"R": 2, "S": 1, "stride": (4, 3), "H": 17, "W": 20, "padding": 0},
    "dilated": {"dilation": (2, 3), "padding": (2, 3), "H": 14, "W": 20},
    "asymmetric": {"padding": ((0, 2), (3, 0)), "H": 9, "W": 17},
    "padding beyond the filter": {"padding": ((4, 3), (5, 2)), "R": 2, "S": 2, "H": 3, "W": 4, "stride": (2, 3)},
    "padding alone": {"H": 2, "W": 2, "R": 2, "S": 2, "dilation": 3},
    "filter beyond the image": {"R": 9, "S": 7, "padding": (4, 3), "H": 3, "W": 2},
    "1x1": {"R": 1, "S": 1, "padding": 0},
    "columns of padding alone": {"H": 15, "W": 1, "S": 1, "padding": ((0, 1), (31, 0)), "stride": (1, 2)},
    "a single row": {"R": 1, "S": 12, "H": 1, "padding": (0, 6), "W": 50},
}
TYPES = [("uint8", "int8"), ("int8", "uint8"), ("uint8", "int32"), ("int8", "float32")]
WAYS = [(isa, product) for isa in INSTRUCTION_SETS for product in vector_products(isa)]


def layer_of(name: str, multiplier: int = 1, **fields: Any) -> ConvLayer:
    fields = {"dtype": "uint8"} | BASE | CASES[name] | fields
    return ConvLayer(**fields, K=multiplier * fields["C"], groups=fields["C"])


@pytest.mark.parametrize("types", TYPES, ids=" to ".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_every_way_gives_what_the_definition_says(
    way: tuple[str, str], case: str, layout: str, types: tuple[str, str]
) -> None:
    layer = layer_of(
        case, layout=layout, dtype=types[0], output_dtype=types[1], activation="relu" if len(case) % 2 else None
    )
    device = device_for(*way)
    for candidate in some_runnable(DEPTHWISE, layer, device, 2):
        check(layer, device, DEPTHWISE, {**candidate.params, "product": way[1]})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, layout: str) -> None:
    device = CPU.current()
    for channels in (1, 3):
        layer = edge(name, C=channels, K=channels, groups=channels, dtype="uint8", layout=layout)
        (candidate,) = some_runnable(DEPTHWISE, layer, device, 1)
        check(layer, device, DEPTHWISE, dict(candidate.params))


@pytest.mark.parametrize("case", ["plain", "strided", "dilated", "a single row"])
@pytest.mark.parametrize("multiplier", [2, 3])
def test_several_filters_of_a_channel(multiplier: int, case: str) -> None:
    layer = layer_of(case, multiplier, output_dtype="int8")
    device = CPU.current()
    check(layer, device, DEPTHWISE, dict(DEPTHWISE.all(layer, device)[0].params))
    last = layer.replace(layout="NHWC")
    (reason,) = DEPTHWISE.unsupported(last)
    assert reason == f"K={last.K}: in NHWC, expected as many filters as the C=19 channels"
    assert Int8().why_not(last, device, Int8().all(last, device)[0].params) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", ["pmaddwd", "plain"])
def test_the_largest_numbers_do_not_saturate_on_their_way(product: str, layout: str) -> None:
    layer = ConvLayer(N=1, C=3, H=6, W=6, K=3, R=5, S=5, groups=3, dtype="uint8", layout=layout)
    device = device_for("avx2" if "avx2" in INSTRUCTION_SETS else INSTRUCTION_SETS[-1], product)
    x, w = np.full(layer.x_shape, 255, np.uint8), np.full(layer.w_shape, 127, np.int8)
    w[1] = -128
    w[2].reshape(-1)[::2] = -128
    candidate = Candidate(DEPTHWISE.name, tuple({"product": product, "TP": 2, "NV": 1}.items()))
    operand = Quantization().operand(layer)
    got = run_guarded(DEPTHWISE, layer, device, candidate, (x, w, operand, None), "after")
    np.testing.assert_array_equal(got, integers.output(layer, integers.sums(layer, x, w)))


def test_rows_of_outputs_share_words() -> None:
    """Of 3x3, two rows see four rows of the image: two words of two, one below the other, or one of four."""

    def panel(product: str, **fields: Any) -> DepthwisePanel:
        return DepthwisePanel(layer_of("plain", **fields), product, 4, 1, 8, 2)

    found = {product: panel(product) for product in ("pmaddwd", "vpdpbusd")}
    assert [(p.words, p.shared) for p in found.values()] == [(2, 2), (1, 2)]
    assert [
        [p.tap(0, row, t) for row in range(p.rows)] for t, p in ((0, found["vpdpbusd"]), (1, found["vpdpbusd"]))
    ] == [
        [0, 1, 2, None],
        [None, 0, 1, 2],
    ]
    assert [panel("vpdpbusd", **f).shared for f in ({"stride": 2}, {"dilation": 2}, {"R": 5, "S": 5})] == [1, 1, 4]


def test_the_lanes_do_work_of_their_own() -> None:
    """Where `int8` multiplies a whole block of filters for one of them."""
    layer = ConvLayer(N=1, C=96, H=56, W=56, K=96, R=3, S=3, padding=1, groups=96, dtype="uint8", layout="NHWC")
    device = device_for("avx2", "plain")
    estimates = [min(f.estimate(layer, device, c.params) for c in f.all(layer, device)) for f in (DEPTHWISE, Int8())]
    assert 0 < 4 * estimates[0] < estimates[1]
    assert str(plan(layer, "heuristic", device=device).candidate).startswith("int8.depthwise")


def test_who_is_refused_and_why() -> None:
    layer, device = layer_of("plain"), CPU(threads=2, instruction_set="generic")
    assert DEPTHWISE.why_not(layer, device, {"product": "plain", "TP": 2, "NV": 1}) == []
    for changed, reason in (
        ({"product": "tdpbusd"}, "product=tdpbusd: expected "),
        ({"TP": 0}, "TP=0: expected an integer from 1 to 64"),
        ({"NV": "all"}, "NV=all: expected an integer from 1 to 64"),
    ):
        (found,) = DEPTHWISE.why_not(layer, device, {"product": "plain", "TP": 2, "NV": 1} | changed)
        assert found.startswith(reason)
    sparse = layer.replace(W=90, stride=(1, 17))
    params = {"product": "plain", "TP": 2, "NV": 1}
    assert DEPTHWISE.why_not(sparse, device, params) == ["stride: expected at most 16 columns, got 17"]
    assert DEPTHWISE.why_not(sparse.replace(layout="NHWC"), device, params) == []
    dense = layer.replace(groups=1)
    assert DEPTHWISE.why_not(dense, device, {}) == ["channels: expected depthwise, got dense"]


@pytest.mark.skipif(not X86, reason="instructions of x86")
@pytest.mark.parametrize(("processor", "instruction_set", "product", "wanted"), INSTRUCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_product_is_one_instruction_of_registers(
    layout: str, processor: str, instruction_set: str, product: str, wanted: str
) -> None:
    layer = layer_of("plain", C=64, H=56, W=56, layout=layout, output_dtype="uint8")
    most = DEPTHWISE.all(layer, device_for(instruction_set, "plain"))[0].params["TP"]
    panel = DepthwisePanel(layer, product, int(most), 2, VECTOR_BYTES[instruction_set] // 4, 2)
    text = assembly(emit(instruction_set, panel), processor)
    functions = functions_of(text)
    loop = re.search(r"^(\.L\w+):\n(.*?)\tj\w+\s+\1\n", functions["tile"], re.MULTILINE | re.DOTALL)
    assert loop
    assert len(re.findall(wanted, loop[2])) == panel.shared * panel.together
    assert not re.search(r"\(%r[sb]p", loop[2])  # all sums stay in registers
    assert "vpmaddubsw" not in text  # its sums of two products saturate
