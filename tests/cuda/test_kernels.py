"""Every CUDA kernel on the emulator: against float64, on every edge, under every schedule, under sanitizers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layers import edge, operands
from simt.cases import DEVICE, OURS, POINTWISE, candidate_cases, check, checker, kinds, pairwise, run
from simt.emulator import MISSING

from autoconv.algorithm import Algorithm, Params
from autoconv.bench.gpu.cases import SCHEDULES, cases, planned, runnable, variants
from autoconv.layer import ConvLayer
from autoconv.tuning.reference import convolve

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

EVERY = [(a, *case) for a in OURS for case in cases(a)]
SANITIZERS = ("address", "thread")
LEAST = 8  # edges to a family in the everyday suite, at least


def sample(algorithm: Algorithm) -> list[tuple[ConvLayer, Params, int]]:
    """What is planned, and some of the edges."""
    asked = list(planned(algorithm))
    found = cases(algorithm)[len(asked) :]
    return [*asked, *found[:: max(1, len(found) // LEAST)]]


EVERYDAY = [(a, *case) for a in OURS for case in sample(a)]
CLEAN = pairwise(
    [(*case, sanitizer) for case in EVERY for sanitizer in SANITIZERS],
    lambda case: (case[0].name, case[1].direction, case[1].dtype, case[1].layout, case[4]),
)


def named(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={v}" for name, v in value.items()) or "-"
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("algorithm", "layer", "params", "schedule"), EVERYDAY, ids=named)
def test_kernels_agree_with_float64(algorithm: Algorithm, layer: ConvLayer, params: Params, schedule: int) -> None:
    check(replace(DEVICE, schedule=schedule), algorithm, layer, params)


@pytest.mark.stress
@pytest.mark.parametrize(("algorithm", "layer", "params", "schedule"), EVERY, ids=named)
def test_kernels_agree_with_float64_on_every_schedule(
    algorithm: Algorithm, layer: ConvLayer, params: Params, schedule: int
) -> None:
    check_on = checker(algorithm, layer, params)
    for seed in range(SCHEDULES):
        check_on(replace(DEVICE, schedule=seed))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", OURS, ids=named)
def test_every_candidate_meets_every_edge(algorithm: Algorithm) -> None:
    """Every parameter set on every edge that takes it, in every direction, layout and dtype: by pairs of these five.

    All of their combinations are 14,000 kernels; each two that some combination has meet in an eighth of them.
    """
    for layer, params, schedule in candidate_cases(algorithm):
        check(replace(DEVICE, schedule=schedule), algorithm, layer, params)


@pytest.mark.parametrize(("algorithm", "layer", "params", "schedule", "sanitizer"), CLEAN, ids=named)
def test_kernels_are_clean_under_sanitizers(
    algorithm: Algorithm, layer: ConvLayer, params: Params, schedule: int, sanitizer: str
) -> None:
    """Each two of an algorithm, a direction, a type, a layout and a sanitizer, where they go together."""
    check(replace(DEVICE, sanitizer=sanitizer, schedule=schedule), algorithm, layer, params)


@pytest.mark.stress
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize(("algorithm", "layer", "params", "schedule"), EVERY, ids=named)
def test_every_case_is_clean_under_sanitizers(
    algorithm: Algorithm, layer: ConvLayer, params: Params, schedule: int, sanitizer: str
) -> None:
    check(replace(DEVICE, sanitizer=sanitizer, schedule=schedule), algorithm, layer, params)


@pytest.mark.parametrize("algorithm", OURS, ids=named)
def test_schedules_and_optimisation_levels_do_not_change_a_bit(algorithm: Algorithm) -> None:
    layer, params = kinds(algorithm)[0]
    first = run(DEVICE, algorithm, layer, params)
    for schedule, flags in ((1, ("-O0",)), (7, ("-O2",)), (11, ("-O3", "-mf16c"))):
        other = replace(DEVICE, schedule=schedule, flags=flags)
        np.testing.assert_array_equal(run(other, algorithm, layer, params), first)


@pytest.mark.parametrize("algorithm", OURS, ids=named)
def test_a_nan_reaches_what_it_should(algorithm: Algorithm) -> None:
    """Exact kernels spoil the outputs whose receptive field holds it and no other; ReLU passes it on."""
    layers = [*variants("plain", activation="relu"), edge("depthwise", activation="relu")]
    layers += [edge("depthwise", direction="wgrad"), edge("plain", dtype="float16", activation="relu")]
    layers += [edge("plain", direction="wgrad"), edge("pointwise", activation="relu"), POINTWISE]
    layers += [edge("valid", direction="wgrad")]
    layer = next(layer for layer in layers if runnable(algorithm, layer))
    a, b, *_ = operands(layer)
    a[0, 1, 3, 4] = np.nan
    out = run(DEVICE, algorithm, layer, runnable(algorithm, layer)[-1], (a, b, None, None))
    wanted = np.isnan(convolve(layer, a, b))
    assert np.isnan(out)[wanted].all()
    assert algorithm.spreads_nonfinite or not np.isnan(out)[~wanted].any()


@pytest.mark.parametrize("algorithm", OURS, ids=named)
def test_an_infinite_filter_stays_in_its_channel(algorithm: Algorithm) -> None:
    """Of the output; in wgrad, an infinite gradient in its filter. It meets padding only where that is skipped."""
    for layer, params in kinds(algorithm):
        a, b, *epilogue = operands(layer)
        b[0, 0, 0, 0] = np.inf
        with np.errstate(invalid="ignore"):
            out = run(DEVICE, algorithm, layer, params, (a, b, *epilogue)).astype(float)
        spoilt = ~np.isfinite(convolve(layer, a, b, *epilogue))
        assert not np.isfinite(out)[spoilt].any()
        if algorithm.skips_padding:
            assert np.isfinite(out)[~spoilt].all()
        elif not algorithm.spreads_nonfinite:
            channel = 0 if layer.direction == "wgrad" else 1 if layer.layout == "NCHW" else 3
            assert np.isfinite(np.delete(out, 0, axis=channel)).all()
