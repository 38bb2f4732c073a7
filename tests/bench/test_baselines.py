"""The real baselines, where they are installed: their answers, and that they print nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from layers import edge

from autoconv.bench import agreement
from autoconv.bench.baselines import ALL_BASELINES, BASELINES, Baseline, Problem
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import LAYOUTS, ConvLayer
from autoconv.tuning import reference

EPILOGUE: dict[str, Any] = {"bias": True, "residual": True, "activation": "relu"}
LAYERS = {
    "all at once": edge("remainders", **EPILOGUE),
    "dilated": ConvLayer(N=2, C=8, H=9, W=11, K=12, R=3, S=3, padding=2, dilation=2, activation="relu"),
    "grouped": ConvLayer(N=3, C=16, H=9, W=11, K=32, R=3, S=1, stride=(1, 2), padding=(1, 0), groups=2, bias=True),
    "channels last": edge("remainders", layout="NHWC", **EPILOGUE),
    "fully connected": ConvLayer(N=2, C=24, H=1, W=5, K=20, R=1, S=1, layout="NHWC", bias=True, activation="relu"),
    "depthwise": ConvLayer(N=1, C=16, H=9, W=11, K=16, R=3, S=3, padding=1, groups=16, bias=True, residual=True),
}
UNEVEN = ConvLayer(N=1, C=8, H=9, W=11, K=16, R=3, S=3, padding=((1, 0), (0, 2)))


def there(name: str) -> Baseline:
    baseline = ALL_BASELINES[name]
    if missing := baseline.missing():
        pytest.skip(f"NOT CHECKED: {', '.join(missing)} not installed")
    return baseline


def error(baseline: Baseline, layer: ConvLayer, constant: bool, fresh: bool) -> float:
    problem = Problem.draw(layer, CPU.current())
    want = reference.convolve(layer, problem.a, problem.b, problem.bias, problem.residual)
    prepared = baseline.prepare(problem, CPU.current(), constant, fresh)
    first = prepared.run()
    again = prepared.run()
    assert (first is again) == (baseline.reuses and not fresh)
    got = prepared.read(again)
    assert got.shape == want.shape
    return agreement.disagreement(got, want)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_the_real_baselines_agree(direction: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    baseline = there(name)
    gradients = [edge("remainders", direction=direction, layout=layout) for layout in LAYOUTS]
    cases = LAYERS.values() if direction == "fwd" else gradients
    for layer, constant, fresh in itertools.product(cases, [True, False], [True, False]):
        if baseline.takes(direction, constant):
            assert error(baseline, layer, constant, fresh) < 1e-5
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", [name for name, baseline in ALL_BASELINES.items() if "bfloat16" in baseline.dtypes])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_real_baselines_agree_in_16_bits(layer: str, dtype: str, name: str) -> None:
    baseline = there(name)
    try:
        assert error(baseline, LAYERS[layer].replace(dtype=dtype), True, False) < agreement.AGREEMENT
    except PlanError as refusal:
        if name != "torch_packed" or "needs the cpu support" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    if baseline.takes("wgrad", True, dtype):
        assert error(baseline, edge("remainders", direction="wgrad", dtype=dtype), True, False) < agreement.AGREEMENT


@pytest.mark.parametrize("name", ALL_BASELINES)
def test_other_types_than_theirs_are_refused(name: str) -> None:
    baseline, device = ALL_BASELINES[name], CPU.current()
    dtype = next(dtype for dtype in ("bfloat16", "float32", "float64") if dtype not in baseline.dtypes)
    problem = Problem.draw(edge("plain", dtype=dtype), device)
    with pytest.raises(PlanError, match=f"dtype='{dtype}': {baseline.label} is given {', '.join(baseline.dtypes)}"):
        baseline.prepare(problem, device, constant=True, fresh=False)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("constant", [True, False])
def test_what_a_run_reads_stays_its_own(constant: bool, name: str) -> None:
    """Copies in NCHW belong to nobody else: their memory is not given to the next who asks."""
    baseline, device = there(name), CPU.current()
    if not baseline.takes("fwd", constant):
        pytest.skip("takes constant filters alone")
    layer = ConvLayer(N=1, C=3, H=9, W=11, K=5, R=3, S=3, padding=1, layout="NHWC", residual=True)
    problem = Problem.draw(layer, device)
    want = reference.convolve(layer, problem.a, problem.b, None, problem.residual)
    prepared = baseline.prepare(problem, device, constant, False)
    others = [device.empty(shape, np.float32) for shape in (layer.x_shape, layer.w_shape, layer.y_shape) * 4]
    for other in others:
        other.fill(7.0)
    assert agreement.disagreement(prepared.read(prepared.run()), want) < 1e-5


@pytest.mark.parametrize("name", BASELINES)
def test_padding_on_one_side_is_right_or_refused(name: str) -> None:
    baseline = there(name)
    if name.startswith("torch"):
        with pytest.raises(PlanError, match="expected the same on both sides"):
            error(baseline, UNEVEN, True, False)
    else:
        assert error(baseline, UNEVEN, True, False) < 1e-5


@pytest.mark.parametrize("name", BASELINES)
def test_a_transposed_convolution_with_an_epilogue_is_refused(name: str) -> None:
    baseline, device = BASELINES[name], CPU.current()
    problem = Problem.draw(edge("plain", direction="dgrad", bias=True, activation="relu"), device)
    with pytest.raises(PlanError, match="direction='dgrad': "):
        baseline.prepare(problem, device, constant=True, fresh=False)
