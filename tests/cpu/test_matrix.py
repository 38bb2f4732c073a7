"""Products of tiles, emulated: right on every kind of layer, nothing touched outside the arrays; and AMX's code."""

from __future__ import annotations

import os
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from assembly import assembly, functions_of
from guards import check_guarded, run_guarded
from layers import EPILOGUES, operands
from vectors import INSTRUCTION_SETS, machine_named, tile_device

from autoconv import networks, registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common.split_products import SPLIT_PRODUCTS
from autoconv.cpu import permission, pool
from autoconv.cpu.codegen.ir import X86, Module
from autoconv.cpu.common.correlation import flat_correlations
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.common.tiles.algorithm import X3_BOUND
from autoconv.cpu.common.tiles.products import DEPTH
from autoconv.cpu.device import CPU
from autoconv.cpu.matrix import ALGORITHMS, gradients_kernels, kernels
from autoconv.cpu.matrix.algorithm import Matrix, MatrixX3, blockings_of
from autoconv.cpu.matrix.geometry import Panel, blocking
from autoconv.cpu.matrix.gradients import MatrixWgrad, MatrixX3Wgrad
from autoconv.cpu.matrix.gradients_geometry import wgrad_cut
from autoconv.cpu.matrix.pointwise import MatrixX3Pointwise
from autoconv.errors import PlanError
from autoconv.layer import DIRECTIONS, LAYOUTS, ConvLayer
from autoconv.tuning import reference

pytestmark = [
    pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor"),
    pytest.mark.skipif(os.name != "posix", reason="guard pages are POSIX"),
]
MATRIX, X3, WGRAD = Matrix(), MatrixX3(), MatrixWgrad()
APART = "matrix.dot", "matrix.pointwise", "matrix.x3.pointwise"  # which have files of their own
FAMILIES = [algorithm for algorithm in ALGORITHMS if algorithm.name not in APART]
DTYPES = MATRIX.dtypes
WHOLE = {"N": 2, "C": 64, "H": 6, "W": 8, "K": 64, "R": 3, "S": 3, "padding": 1}  # whole tiles of everything
LAYERS: dict[str, dict[str, Any]] = {
    "whole tiles": {},
    "1x1": {"R": 1, "S": 1, "padding": 0},
    "1x1, remainders": {"C": 67, "K": 37, "H": 7, "W": 7, "R": 1, "S": 1, "padding": 0},
    "a pixel": {"N": 1, "C": 3, "K": 1, "H": 1, "W": 1, "R": 1, "S": 1, "padding": 0},
    "remainders": {"C": 35, "K": 50, "H": 5, "W": 13},
    "a single tile of filters": {"C": 33, "K": 9},
    "stride 2": {"stride": 2, "H": 9, "W": 11},
    "1x1 of stride 2": {"C": 40, "R": 1, "S": 1, "padding": 0, "stride": 2, "H": 7},
    "strides and dilation": {"stride": (1, 3), "dilation": (2, 2), "H": 9, "W": 17},
    "padding on one side": {"padding": ((3, 0), (0, 4)), "R": 2, "S": 4},
    "padding beyond the filter": {"padding": 4, "W": 3},
    "5x5": {"C": 20, "R": 5, "S": 5, "padding": 2},
    "groups": {"groups": 3, "C": 60, "K": 45},
    "a long row": {"N": 1, "C": 16, "H": 1, "W": 300, "R": 1, "padding": (0, 1)},
    "many pixels": {"N": 1, "C": 8, "K": 8, "H": 20, "W": 31},
}
DGRADS = ("whole tiles", "1x1", "remainders", "stride 2", "1x1 of stride 2", "strides and dilation", "groups")


def layer_of(name: str, **fields: Any) -> ConvLayer:
    return ConvLayer(**(WHOLE | LAYERS[name] | fields))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_forward(instruction_set: str, name: str, dtype: str, layout: str) -> None:
    layer = layer_of(name, dtype=dtype, layout=layout)
    assert check_guarded(MATRIX, layer, tile_device(instruction_set), operands(layer))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DGRADS)
def test_gradient_of_the_input(name: str, dtype: str, layout: str) -> None:
    layer = layer_of(name, dtype=dtype, layout=layout, direction="dgrad")
    assert check_guarded(MATRIX, layer, tile_device(), operands(layer))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue: str, dtype: str, layout: str) -> None:
    layer = layer_of("remainders", dtype=dtype, layout=layout, **EPILOGUES[epilogue])
    assert check_guarded(MATRIX, layer, tile_device(), operands(layer))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "a pixel"])  # whose sums have three terms
def test_three_products_of_float32_keep_their_bound(name: str) -> None:
    layer = layer_of(name)
    assert check_guarded(X3, layer, tile_device(), operands(layer))


@pytest.mark.parametrize("strip", [16, 32, 48, 96])
@pytest.mark.parametrize("BC", [32, 64, 96, 130])
def test_strips_and_blocks_of_channels(strip: int, BC: int) -> None:
    """Of images, of rows, of parts of rows; the last of each does some of its neighbour's work again."""
    for fields in ({"N": 5, "H": 3, "W": 3}, {"H": 7, "W": 9}, {"N": 1, "H": 2, "W": 71}, {"H": 5, "R": 1, "S": 1}):
        layer = ConvLayer(**(WHOLE | {"C": 130, "K": 90} | fields))
        candidate = Candidate("matrix", (("products", 6), ("strip", strip), ("BC", BC)))
        assert not MATRIX.why_not(layer, tile_device(), candidate.params)
        got = run_guarded(MATRIX, layer, tile_device(), candidate, operands(layer), "after")
        want, magnitude = (f(layer, *operands(layer)) for f in (reference.convolve, reference.magnitude))
        assert reference.error(got, want, magnitude) <= MATRIX.bound(layer, candidate.params)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_of_the_filters(name: str, dtype: str, layout: str) -> None:
    layer = layer_of(name, dtype=dtype, layout=layout, direction="wgrad")
    assert check_guarded(WGRAD, layer, tile_device(), operands(layer))


@pytest.mark.parametrize("strip", [32, 64, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", [MatrixWgrad(), MatrixX3Wgrad()], ids=lambda a: a.name)
def test_strips_of_a_gradient_are_added(algorithm: Algorithm[Any], layout: str, strip: int) -> None:
    """Of images, of rows, of parts of rows; the last of each may be shorter."""
    for fields in (
        {"N": 5, "H": 3, "W": 3},
        {"H": 7, "W": 9, "stride": 2},
        {"N": 1, "H": 2, "W": 71},
        {"N": 3, "H": 5, "R": 1, "S": 1},
    ):
        layer = ConvLayer(**(WHOLE | {"C": 50, "K": 35, "layout": layout, "direction": "wgrad"} | fields))
        products = algorithm.all(layer, tile_device())[0].params["products"]
        candidate = Candidate(algorithm.name, (("products", products), ("strip", strip)))
        assert not algorithm.why_not(layer, tile_device(), candidate.params)
        got = run_guarded(algorithm, layer, tile_device(), candidate, operands(layer), "after")
        want, magnitude = (f(layer, *operands(layer)) for f in (reference.convolve, reference.magnitude))
        assert reference.error(got, want, magnitude) <= algorithm.bound(layer, candidate.params)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", [Polyphase(MATRIX), Polyphase(X3)], ids=lambda a: a.name)
def test_a_strided_gradient_by_polyphase_components(algorithm: Algorithm[Any], layout: str) -> None:
    layer = layer_of("stride 2", layout=layout, direction="dgrad")
    assert check_guarded(algorithm, layer, tile_device(), operands(layer))


def test_rows_share_their_padding() -> None:
    """Outputs of a row and the next lie one column of padding apart, not two."""
    (c,) = flat_correlations(ConvLayer(N=1, C=32, H=8, W=14, K=32, R=3, S=3, padding=1))
    panel = Panel(c, blocking(c, 1, 1024, 32, 1))
    assert (panel.pitch, panel.tiles) == (15, -(-(7 * 15 + 14) // 16))
    (flat,) = flat_correlations(ConvLayer(N=1, C=32, H=7, W=7, K=32, R=1, S=1))
    assert Panel(flat, blocking(flat, 1, 1024, 32, 1)).tiles == 4


def _suites() -> dict[str, ConvLayer]:
    """Of every dense sum among the layers of the suites, all terms for some outputs."""
    found = {}
    for name in networks.names():
        for layer in (named.layer for named in networks.load(name).layers if not named.layer.depthwise):
            extents = zip((layer.H, layer.W), layer.stride, (layer.R, layer.S), layer.dilation, strict=True)
            H, W = (min(size, 11 * stride + (taps - 1) * apart + 1) for size, stride, taps, apart in extents)
            C, K = layer.C // layer.groups, min(32, layer.K // layer.groups)
            cut = layer.replace(C=C, H=H, W=W, K=K, groups=1, bias=False, residual=False, activation=None)
            found.setdefault(f"{C}x{layer.R}x{layer.S}, stride {layer.stride}, dilation {layer.dilation}", cut)
    return found


SUITES = _suites()


def summed_in_float32(layer: ConvLayer, x: Any, w: Any) -> Any:
    """The convolution with all products of an output added one after the other, in float32."""
    x = np.pad(x, ((0, 0), (0, 0), *layer.padding))
    y = np.zeros(layer.output_shape, np.float32)
    (down, across), (P, Q) = layer.stride, y.shape[2:]
    for c, r, s in np.ndindex(w.shape[1:]):
        top, left = r * layer.dilation[0], s * layer.dilation[1]
        seen = x[:, c, top : top + down * P : down, left : left + across * Q : across][:, :, :Q]
        y += w[:, c, r, s][:, None, None] * seen[:, None, :P]
    return y


@pytest.mark.parametrize("name", SUITES)
def test_six_products_err_no_more_than_sums_in_float32(name: str) -> None:
    layer = SUITES[name]
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in layer.input_shapes)
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)

    def error(algorithm: Algorithm[Any]) -> float:
        got = run_guarded(
            algorithm, layer, tile_device(), algorithm.all(layer, tile_device())[0], (x, w, None, None), "after"
        )
        return reference.error(got, want, magnitude)

    plain = summed_in_float32(layer, x, w)
    assert reference.error(plain, want, magnitude) < 1e-5, "the yardstick is the same convolution"
    assert error(MATRIX) <= reference.error(plain, want, magnitude)
    assert 1e-7 < error(X3) < 1.2e-5


VALUES = {
    "infinity": np.inf,
    "minus infinity": -np.inf,
    "NaN": np.nan,
    "NaN of all bits": 0xFFFFFFFF,
    "smallest NaN": 0x7F800001,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", [MATRIX, X3], ids=lambda a: a.name)
@pytest.mark.parametrize("value", VALUES)
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(
    value: str, algorithm: Algorithm[Any], layout: str
) -> None:
    layer = ConvLayer(N=2, C=40, H=9, W=10, K=20, R=3, S=3, padding=1, layout=layout)
    x, w, *_ = operands(layer)
    w = np.where(w == 0, np.float32(0.5), w)
    bits = VALUES[value]
    number = np.uint32(bits).view(np.float32) if isinstance(bits, int) else np.float32(bits)
    spoilt = x.copy()
    place = (1, 5, 4, 3) if layout == "NCHW" else (1, 4, 3, 5)
    spoilt[place] = number
    candidate = algorithm.all(layer, tile_device())[0]
    clean, got = (
        run_guarded(algorithm, layer, tile_device(), candidate, (a, w, None, None), "after") for a in (x, spoilt)
    )
    seen = np.zeros(layer.y_shape, bool)
    if layout == "NCHW":
        seen[1, :, 3:6, 2:5] = True
    else:
        seen[1, 3:6, 2:5, :] = True
    assert not np.isfinite(got[seen]).any()
    np.testing.assert_array_equal(got[~seen], clean[~seen])


def test_finite_numbers_near_the_largest_stay_finite() -> None:
    layer = ConvLayer(N=1, C=32, H=4, W=4, K=16, R=1, S=1)
    x, w = np.ones(layer.x_shape, np.float32), np.full(layer.w_shape, 2.0**-10, np.float32)
    x[0, 3] = np.finfo(np.float32).max
    want = reference.convolve(layer, x, w)
    for algorithm in (MATRIX, X3):
        candidate = algorithm.all(layer, tile_device())[0]
        got = run_guarded(algorithm, layer, tile_device(), candidate, (x, w, None, None), "after")
        np.testing.assert_allclose(got, want, rtol=1e-5 if algorithm is X3 else 2e-7)


def test_precision_fades_where_parts_of_numbers_are_subnormal() -> None:
    """Down to 2**-100 as ever; far below, a term errs by about 2**-126 times the other factor."""
    layer = ConvLayer(N=1, C=64, H=4, W=4, K=16, R=1, S=1)
    x, w, *_ = operands(layer)
    for exponent, bound in ((-60, 2e-6), (-100, 2e-6), (-118, 2e-3)):
        small = np.ldexp(x, exponent)
        want, magnitude = reference.convolve(layer, small, w), reference.magnitude(layer, small, w)
        candidate = MATRIX.all(layer, tile_device())[0]
        got = run_guarded(MATRIX, layer, tile_device(), candidate, (small, w, None, None), "after")
        assert reference.error(got, want, magnitude) <= bound, exponent


def for_amx(layer: ConvLayer) -> Module:
    """The first candidate's kernel."""
    device = CPU(threads=2, instruction_set="avx512", matrix_unit="amx")
    if layer.direction == "wgrad":
        cut = wgrad_cut(layer, MATRIX.products[layer.dtype], 1024, device.threads)
        return gradients_kernels.emit("avx512", "amx", layer, cut)
    return kernels.emit("avx512", "amx", layer, blockings_of(layer, device, MATRIX.all(layer, device)[0].params))


@pytest.mark.skipif(not X86, reason="instructions of x86")
@pytest.mark.parametrize("direction", ["fwd", "wgrad"])
@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", 1), ("float16", 3), ("float32", 6)])
def test_the_code_for_amx(dtype: str, products: int, direction: str) -> None:
    layer = layer_of("whole tiles", dtype=dtype, direction=direction)
    module = for_amx(layer)
    text = assembly(module, "sapphirerapids")
    functions = functions_of(text)
    (block,) = (body for name, body in functions.items() if name.startswith("block_2x2"))
    assert block.count("tdpbf16ps") == 4 * products  # each step of the loop, nothing unrolled
    loads = {1: 4, 3: 8, 6: 14}[products]
    assert block.count("tileloadd") == loads + 4  # and the sums that go on
    assert "ymm" not in block
    tasks = [body for name, body in functions.items() if re.match(r"task|multiply", name)]
    assert tasks
    for task in tasks:
        words = re.findall(r"ldtilecfg|tilerelease|call|ret[q\n]", task)
        assert words[0] == "ldtilecfg"
        assert words[-2] == "tilerelease"
    if dtype != "bfloat16":
        assert "vcvtneps2bf16" in text
    assert "__trunc" not in text  # no function for what is an instruction
    assert str(module).count("llvm.x86.ldtilecfg(ptr @") == len(tasks)


def test_estimates_count_products_and_what_is_moved() -> None:
    """Twice the filters or images cost about twice; six products more than three; a larger output, more."""
    device = tile_device()

    def estimated(algorithm: Algorithm[Any], **fields: Any) -> float:
        layer = layer_of("whole tiles", **({"N": 8, "H": 32, "W": 32} | fields))
        return min(algorithm.estimate(layer, device, c.params) for c in algorithm.all(layer, device))

    for algorithm in FAMILIES:
        fields = {"direction": algorithm.directions[-1], "stride": 2 if "polyphase" in algorithm.name else 1}
        once = estimated(algorithm, **fields)
        assert 1e-6 < once < 10
        assert 1.5 < estimated(algorithm, N=16, **fields) / once < 2.5
        assert 1.5 < estimated(algorithm, K=128, **fields) / once < 2.5
    assert 1.5 < estimated(MATRIX) / estimated(X3) < 2.1


def test_estimates_tell_how_many_channels_are_summed_at_a_time() -> None:
    """With few of them sums come and go often; the filters of all do not fit into the second cache."""
    layer = ConvLayer(N=1, C=1024, H=15, W=15, K=1024, R=3, S=3, padding=1)
    device = CPU(2, "avx512", matrix_unit="amx", model=machine_named("xeon-amx").text)
    few, some, every = (X3.estimate(layer, device, {"products": 3, "strip": 256, "BC": BC}) for BC in (32, 128, 1024))
    assert some < few
    assert some < every


def test_without_a_matrix_unit_there_are_no_candidates() -> None:
    device = CPU(threads=2, instruction_set="avx2")
    for algorithm in FAMILIES:
        layer = layer_of("stride 2", direction=algorithm.directions[-1])
        assert not algorithm.all(layer, device)
        params = algorithm.all(layer, tile_device())[0].params
        reasons = algorithm.why_not(layer, device, params)
        assert reasons == ["matrix_unit=None: expected a processor with a matrix unit (AMX)"]


def test_who_is_refused_and_why() -> None:
    layer, params = layer_of("remainders"), {"products": 6, "strip": 128, "BC": 35}
    assert MATRIX.why_not(layer, tile_device(), params) == []
    for changed, reason in (
        ({"products": 3}, "products=3: expected 6 for float32"),
        ({"strip": 15}, "strip=15: expected at least the 16 outputs of a tile"),
        ({"BC": 33}, f"BC=33: expected all 35 channels, or some multiple of {DEPTH} of them"),
        ({"BC": 64}, "BC=64: expected all 35 channels"),
        ({"BC": 0}, "BC=0: expected all 35 channels"),
    ):
        (found,) = MATRIX.why_not(layer, tile_device(), params | changed)
        assert reason in found


def test_three_products_are_for_sums_of_many_terms() -> None:
    """A single term may err by 2**-15 of itself, beyond the cap; in a sum of some that makes up for itself."""
    few, many = (WHOLE | {"N": 1, "C": C, "H": 5, "W": 7, "R": 1, "S": 1, "padding": 0} for C in (15, 16))
    params = {"products": 3, "strip": 128}
    for algorithm in (X3, MatrixX3Pointwise()):
        (reason,) = algorithm.why_not(ConvLayer(**few), tile_device(), params | {"BC": 15})
        assert reason == "terms of a sum: expected at least 16, got 15"
        assert not algorithm.why_not(ConvLayer(**many), tile_device(), params | {"BC": 16})
    wgrad = MatrixX3Wgrad()
    layer = ConvLayer(**(few | {"H": 3, "W": 5})).replace(direction="wgrad")
    assert wgrad.why_not(layer, tile_device(), params) == ["terms of a sum: expected at least 16, got 15"]
    x = np.full((1, 1, 1, 1), 1 + 2.0**-8 - 3 * 2.0**-17, np.float32)  # what is left of it is as large as can be, twice
    parts = [np.float32(x.astype(ml_dtypes.bfloat16))]
    parts.append(np.float32((x - parts[0]).astype(ml_dtypes.bfloat16)))
    term = float(x[0, 0, 0, 0]) ** 2
    kept = sum(float(a[0, 0, 0, 0]) * float(b[0, 0, 0, 0]) for a, b in ((parts[0], parts[0]), parts, parts[::-1]))
    assert X3_BOUND < abs(kept - term) / term < 2.0**-15


def test_who_wants_no_products_that_err_more_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three parts, that is; six err no more than sums in float32, and are offered all the same."""
    layers = {way: layer_of("whole tiles", direction=way, stride=1 + (way == "dgrad")) for way in DIRECTIONS}
    families = [a for a in registry.algorithms(tile_device()) if "matrix" in a.name and "float32" in a.dtypes]
    assert {"matrix", "matrix.x3", "matrix.x3.wgrad", "matrix.x3.polyphase", "winograd.matrix"} < {
        a.name for a in families
    }
    for family in families:
        layer = layers[family.directions[0]]
        if "pointwise" in family.name:
            layer = layer.replace(R=1, S=1, padding=0)
        params = family.all(layer, tile_device())[0].params
        assert family.why_not(layer, tile_device(), params) == []
        with monkeypatch.context() as patch:
            patch.setenv(SPLIT_PRODUCTS, "0")
            reasons = family.why_not(layer, tile_device(), params)
        forbidden = [f"{SPLIT_PRODUCTS}=0: expected no products of parts that err more than sums in float32"]
        assert reasons == (forbidden if "x3" in family.name else [])


def test_a_refused_permission_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "granted", lambda: False)
    device = CPU(threads=2, instruction_set="avx512", matrix_unit="amx")
    for algorithm in FAMILIES:
        layer = layer_of("stride 2", direction=algorithm.directions[-1])
        params = algorithm.all(layer, device)[0].params
        with pytest.raises(PlanError, match="matrix_unit='amx': expected a process that may use tiles"):
            algorithm.build(layer, device, params)
