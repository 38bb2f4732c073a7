"""float32 from several products of tensor cores: how exact, and what becomes of numbers at the ends of the range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simt.cases import DEVICE, run
from simt.emulator import MISSING

from autoconv.algorithm import Params
from autoconv.bench.gpu.cases import SCALAR_TILE
from autoconv.common.split_products import SPLIT_PRODUCTS
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.cuda.gemm import gemm
from autoconv.cuda.gemm.gemm import Gemm
from autoconv.cuda.gemm.tensor import TensorBF16x6, TensorTF32, TensorTF32x3
from autoconv.cuda.hopper.hopper import HopperTF32
from autoconv.cuda.hopper.pointwise import HopperBF16x6Pointwise
from autoconv.cuda.hopper.split import HopperBF16x6
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

# Bits, and one, of their first parts.
POINTWISE = HopperBF16x6Pointwise()
FAMILIES: dict[CudaAlgorithm, int] = {TensorTF32x3(): 12, TensorBF16x6(): 9, HopperBF16x6(): 9, POINTWISE: 9}
families = pytest.mark.parametrize("split", FAMILIES, ids=lambda one: one.name)
PARAMS: dict[str, int] = {"BM": 64, "BN": 64, "SPLIT": 1}
STAGES = {HopperBF16x6: 3, HopperBF16x6Pointwise: 3, HopperTF32: 4}  # of such a tile
DEPTH = 4608
DEEP = {
    "fwd": {"N": 1, "C": 512, "H": 3, "W": 3, "K": 8, "R": 3, "S": 3, "padding": 1},
    "dgrad": {"N": 1, "C": 8, "H": 3, "W": 3, "K": 512, "R": 3, "S": 3, "padding": 1},
    "wgrad": {"N": 32, "C": 8, "H": 12, "W": 12, "K": 8, "R": 1, "S": 1},
}
DEEP_OF_ONE_TAP = {
    "fwd": {"N": 1, "C": DEPTH, "H": 3, "W": 4, "K": 8, "R": 1, "S": 1},
    "dgrad": {"N": 1, "C": 8, "H": 3, "W": 4, "K": DEPTH, "R": 1, "S": 1},
}
SMALL = ConvLayer(N=1, C=16, H=1, W=8, K=8, R=1, S=1)


def params(algorithm: CudaAlgorithm) -> Params:
    stages = STAGES.get(type(algorithm))
    return PARAMS | ({"STAGES": stages} if stages else {})


def layout(algorithm: CudaAlgorithm) -> str:
    return "NCHW" if algorithm is POINTWISE else "NHWC"


def deep(direction: str, algorithm: CudaAlgorithm | None = None) -> tuple[ConvLayer, Any, Any]:
    """A layer of 4608 products to an output, and positive numbers for it: what is cut off of sums all adds up."""
    if algorithm is POINTWISE:
        layer = ConvLayer(**DEEP_OF_ONE_TAP[direction], direction=direction)  # type: ignore[arg-type]
    else:
        layer = ConvLayer(**DEEP[direction], layout="NHWC", direction=direction)  # type: ignore[arg-type]
    generator = np.random.default_rng(0)
    a, b = (generator.uniform(1, 2, shape).astype(np.float32) for shape in layer.input_shapes)
    return layer, a, b


def found(algorithm: Any, layer: ConvLayer, a: Any, b: Any, given: Params | None = None) -> float:
    out = run(DEVICE, algorithm, layer, given or params(algorithm), (a, b, None, None))
    return error(out, convolve(layer, a, b), magnitude(layer, a, b))


@pytest.mark.parametrize(
    ("split", "direction"),
    [
        pytest.param(one, d, marks=() if d == "fwd" else pytest.mark.stress, id=f"{d}-{one.name}")
        for one in FAMILIES
        for d in one.directions
    ],
)
def test_a_deep_sum_of_one_sign_is_as_exact_as_float32(split: CudaAlgorithm, direction: str) -> None:
    """On tensor cores that cut off: half of what is allowed, where one long sum drifts off by fifty times that."""
    layer, a, b = deep(direction, split)
    assert found(split, layer, a, b) <= split.bound(layer, params(split)) / 2


@pytest.mark.parametrize("direction", DEEP)
def test_a_deep_sum_of_one_sign_in_scalar_arithmetic_keeps_its_bound(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room to spare, by stretches of the depth; in one sum it errs more."""
    layer, a, b = deep(direction)
    scalar, params = Gemm(), SCALAR_TILE | {"SPLIT": 1}
    error_by_stretches = found(scalar, layer, a, b, params)
    assert error_by_stretches <= 0.7 * scalar.bound(layer, params)
    monkeypatch.setattr(gemm, "LONGEST_SUM", DEPTH)
    assert found(scalar, layer, a, b, params) > error_by_stretches


@pytest.mark.stress
@pytest.mark.parametrize(
    ("rounded", "direction"), [*((TensorTF32(), direction) for direction in DEEP), (HopperTF32(), "fwd")]
)
def test_a_deep_sum_left_to_tensor_cores_drifts(rounded: CudaAlgorithm, direction: str) -> None:
    """With operands that tf32 holds exactly, all that is lost is lost by the sums: the emulator cuts off, too."""
    layer, *given = deep(direction)
    a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in given)
    assert found(rounded, layer, a, b) > 20 * next(iter(FAMILIES)).bound(layer, PARAMS)


def first(array: Any, split: CudaAlgorithm) -> Any:
    """Of the first line of pixels, their first channels."""
    return array[0, 0, 0] if layout(split) == "NCHW" else array[0, 0, :, 0]


def on_a_line(split: CudaAlgorithm, values: list[float], weight: float = 1.0) -> tuple[ConvLayer, Any, Any]:
    """A layer, pixels whose first channels are these numbers, the others 1, and filters of one weight."""
    layer = SMALL.replace(layout=layout(split))
    x = np.ones(layer.x_shape, np.float32)
    first(x, split)[: len(values)] = values
    return layer, x, np.full(layer.w_shape, weight, np.float32)


def products(split: CudaAlgorithm, values: list[float], weight: float = 1.0) -> tuple[Any, Any]:
    """What comes out, and what should: of one filter, at the pixels of these numbers."""
    layer, x, w = on_a_line(split, values, weight)
    with np.errstate(all="ignore"):
        want = first(convolve(layer, x, w), split)
    out = first(run(replace(DEVICE, schedule=3), split, layer, params(split), (x, w, None, None)), split)
    assert np.isfinite(out[len(values) :]).all()  # nobody else's sums are touched
    return out[: len(values)], want[: len(values)]


@families
def test_infinities_and_nans_make_sums_that_are_not_finite(split: CudaAlgorithm) -> None:
    out, want = products(split, [np.inf, -np.inf, np.nan, 2.0])
    assert not np.isfinite(want[:3]).any()
    assert not np.isfinite(out[:3]).any()
    assert out[3] == want[3] == 17


@families
def test_numbers_next_to_the_largest_count_as_infinite(split: CudaAlgorithm) -> None:
    """From half a unit in the last place of a first part below 2**128 on; below, all parts are exact enough."""
    edge = float(np.float32(2.0**128 * (1 - 2.0 ** -FAMILIES[split])))
    below = float(np.nextafter(np.float32(edge), np.float32(0)))
    out, want = products(split, [edge, float(np.finfo(np.float32).max), below, -below], 2.0**-10)
    assert np.isfinite(want).all()
    assert not np.isfinite(out[:2]).any()
    np.testing.assert_allclose(out[2:], want[2:], rtol=2e-6)


@families
@pytest.mark.parametrize("power", [-100, -113])
def test_small_numbers_are_split_like_others(split: CudaAlgorithm, power: int) -> None:
    layer, x, w = on_a_line(split, [1 + 2.0**-23, 1 / 3, 0.7])
    x *= np.float32(2.0**power)
    assert found(split, layer, x, w) <= split.bound(layer, params(split))


@families
def test_no_product_that_counts_is_missing(split: CudaAlgorithm) -> None:
    """Of numbers whose three parts have one sign, the least of six products of them is 6e-6 of the whole."""
    value = 1 + 2.0**-8 * (1 - 2.0**-6) + 2.0**-17 * 0.75
    layer = SMALL.replace(layout=layout(split))
    x, w = (np.full(shape, value, np.float32) for shape in layer.input_shapes)
    out = run(DEVICE, split, layer, params(split), (x, w, None, None))
    np.testing.assert_allclose(out, convolve(layer, x, w), rtol=2.0**-20)


@families
def test_who_wants_no_split_products_gets_none(
    split: CudaAlgorithm, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ConvLayer(N=1, C=8, H=4, W=4, K=8, R=1, S=1, layout=layout(split))
    cache = TuningCache(tmp_path)
    assert plan(layer, split.name, device=DEVICE, cache=cache).candidate.algorithm == split.name
    with pytest.raises(PlanError, match=f"exact=True leaves {split.name} out"):
        plan(layer, split.name, device=DEVICE, cache=cache, exact=True)
    monkeypatch.setenv(SPLIT_PRODUCTS, "0")
    with pytest.raises(PlanError, match=f"{SPLIT_PRODUCTS}=0: expected no products of parts"):
        plan(layer, split.name, device=DEVICE, cache=cache, budget=1.0)
