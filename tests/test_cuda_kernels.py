"""Every CUDA kernel on the emulator: against float64, on every edge, under every schedule, under sanitizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layers import EDGES, TAILS, edge, operands
from simt.emulator import MISSING, Emulated, EmulationError, fenced

from autoconv.algorithm import Algorithm, Params
from autoconv.cuda import ALGORITHMS
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.reference import convolve, error, magnitude

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

SCHEDULES = 16
DEVICE = Emulated(capability=90)


def on_device(device: Emulated, array: Any) -> Any:
    if array is None:
        return None
    copy = device.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def run(device: Emulated, algorithm: Algorithm, layer: ConvLayer, params: Params, given: Any = None) -> Any:
    """The output, after checking that nothing else was written."""
    a, b, bias, residual = (on_device(device, array) for array in given or operands(layer))
    kernel = algorithm.build(layer, device, params)
    assert kernel.workspace_bytes == algorithm.workspace_bytes(layer, device, params)
    assert kernel.packed_bytes == algorithm.packed_bytes(layer, device, params)
    workspace, out = device.buffer(kernel.workspace_bytes), device.empty(layer.output_shape, layer.numpy_dtype)
    written = [workspace, out]
    if kernel.packed_bytes:
        packed = device.buffer(kernel.packed_bytes)
        kernel.pack(b, packed)
        written.append(packed)
        b = packed
    kernel.run(a, b, out, bias, residual, workspace)
    assert all(map(fenced, written)), f"{algorithm.name} writes outside its arrays"
    return out


def check(device: Emulated, algorithm: Algorithm, layer: ConvLayer, params: Params) -> None:
    given = operands(layer)
    out = run(device, algorithm, layer, params, given)
    found = error(out, convolve(layer, *given), magnitude(layer, *given))
    assert found <= algorithm.bound(layer, params), f"{algorithm.name} {params} on {layer}: error {found:.2g}"


def runnable(algorithm: Algorithm, layer: ConvLayer, device: Emulated = DEVICE) -> list[Params]:
    return [p for p in algorithm.candidates(layer, device) if not algorithm.why_not(layer, device, p)]


def variants(name: str, **choices: Any) -> Iterator[ConvLayer]:
    """The edge, and what is nearest to it that kernels with narrower tastes can take."""
    groups = EDGES[name].get("groups", 1)
    wide = {"C": 8 * groups, "K": 16 * groups, "layout": "NHWC"}
    yield edge(name, **choices)
    yield edge(name, **(choices | {"dtype": "float32"}))
    yield edge(name, **(choices | wide))
    yield edge(name, **(choices | wide | {"dtype": "float16", "N": 3}))
    yield edge(name, **(choices | wide | {"dtype": "float32"}))


def cases(algorithm: Algorithm) -> Iterator[tuple[ConvLayer, Params, int]]:
    """Each edge in every direction, the other choices taken in turn so that pairs of them meet."""
    turn = 0
    for (i, name), (j, direction) in itertools.product(enumerate(EDGES), enumerate(DIRECTIONS)):
        tail = list(TAILS.values())[i % 4] if direction == "fwd" else {}
        choices = {"dtype": list(DTYPES)[(i + 2 * j) % 4], "layout": LAYOUTS[(i // 4 + j) % 2]}
        for layer in variants(name, direction=direction, **choices, **tail):
            if params := runnable(algorithm, layer):
                yield layer, params[turn % len(params)], turn % SCHEDULES
                turn += 1
                break


EVERY = [(a, *case) for a in ALGORITHMS for case in cases(a)]
LEAST = 8  # cases to a family in the everyday suite, at least


def sample(algorithm: Algorithm) -> list[tuple[Algorithm, ConvLayer, Params, int]]:
    mine = [case for case in EVERY if case[0] is algorithm]
    return mine[:: max(1, len(mine) // LEAST)]


EVERYDAY = [case for a in ALGORITHMS for case in sample(a)]


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
    for seed in range(SCHEDULES):
        check(replace(DEVICE, schedule=seed), algorithm, layer, params)


@pytest.mark.stress
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_every_candidate_of_every_edge(algorithm: Algorithm, name: str) -> None:
    for direction, layout, dtype in itertools.product(DIRECTIONS, LAYOUTS, DTYPES):
        layer = edge(name, direction=direction, layout=layout, dtype=dtype)
        for params in runnable(algorithm, layer):
            check(DEVICE, algorithm, layer, params)


def kinds(algorithm: Algorithm) -> list[tuple[ConvLayer, Params]]:
    """One small case to each direction; of a family's candidates the last, with the smallest tile."""
    found = []
    for name, direction in (("tails", "fwd"), ("strided", "dgrad"), ("grouped", "wgrad"), ("depthwise", "wgrad")):
        for layer in variants(name, direction=direction):
            if params := runnable(algorithm, layer):
                found.append((layer, params[-1]))
                break
    return found or [(edge("depthwise"), runnable(algorithm, edge("depthwise"))[-1])]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_kernels_are_clean_under_sanitizers(algorithm: Algorithm, sanitizer: str) -> None:
    for layer, params in kinds(algorithm)[:1]:
        check(replace(DEVICE, sanitizer=sanitizer), algorithm, layer, params)


@pytest.mark.stress
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize(("algorithm", "layer", "params", "schedule"), EVERY, ids=named)
def test_every_case_is_clean_under_sanitizers(
    algorithm: Algorithm, layer: ConvLayer, params: Params, schedule: int, sanitizer: str
) -> None:
    check(replace(DEVICE, sanitizer=sanitizer, schedule=schedule), algorithm, layer, params)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_schedules_and_optimisation_levels_do_not_change_a_bit(algorithm: Algorithm) -> None:
    layer, params = kinds(algorithm)[0]
    first = run(DEVICE, algorithm, layer, params)
    for schedule, flags in ((1, ("-O0",)), (7, ("-O2",)), (11, ("-O3", "-mf16c"))):
        other = replace(DEVICE, schedule=schedule, flags=flags)
        np.testing.assert_array_equal(run(other, algorithm, layer, params), first)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_a_nan_reaches_what_it_should(algorithm: Algorithm) -> None:
    """Exact kernels spoil the outputs whose receptive field holds it and no other; ReLU passes it on."""
    layers = [*variants("plain", activation="relu"), edge("depthwise", activation="relu")]
    layer = next(layer for layer in layers if runnable(algorithm, layer))
    a, b, *_ = operands(layer)
    a[0, 1, 3, 4] = np.nan
    out = run(DEVICE, algorithm, layer, runnable(algorithm, layer)[-1], (a, b, None, None))
    wanted = np.isnan(convolve(layer, a, b))
    assert np.isnan(out)[wanted].all()
    assert algorithm.spreads_nonfinite or not np.isnan(out)[~wanted].any()


COVERAGE = list(itertools.product(DIRECTIONS, DTYPES, LAYOUTS, (1, 3), (1, 2)))


@pytest.mark.parametrize(("direction", "dtype", "layout", "groups", "dilation"), COVERAGE)
def test_every_cell_has_direct_and_a_gemm(direction: str, dtype: str, layout: str, groups: int, dilation: int) -> None:
    layer = edge("grouped", direction=direction, dtype=dtype, layout=layout, groups=groups, dilation=dilation)
    for capability in (75, 80, 120):
        able = {a.name for a in ALGORITHMS if runnable(a, layer, Emulated(capability=capability))}
        assert {"direct", "gemm"} <= able
    for algorithm in ALGORITHMS:
        for params in algorithm.candidates(layer, DEVICE):
            assert all(reason.strip() for reason in algorithm.why_not(layer, DEVICE, params))


BARRIER = "__syncthreads();"


def mutants(text: str) -> Iterator[str]:
    """The text with one barrier or wait left out."""
    for call in (BARRIER, "wait_copies<"):
        at = text.find(call, text.index("common.cuh"))
        while at >= 0:
            end = text.index(";", at) + 1
            yield text[:at] + ";" + text[end:]
            at = text.find(call, end)


def caught(algorithm: Any, layer: ConvLayer, params: Params, unit: int, text: str) -> bool:
    """Whether some schedule shows that this text of one unit is wrong."""
    from simt import emulator

    units = algorithm.units(layer, params)

    class Mutated(Emulated):
        def load(self, wanted: Any) -> Any:
            if wanted == units[unit]:
                return emulator.launcher(wanted, self.flags, self.schedule, text)
            return super().load(wanted)

    for schedule in range(SCHEDULES):
        try:
            check(Mutated(capability=90, schedule=schedule), algorithm, layer, params)
        except (AssertionError, EmulationError):
            return True
    return False


def mutant_cases() -> Iterator[tuple[Algorithm, ConvLayer, Params, int, str]]:
    """Of kernels that share memory; with channels for several slices, since a single one needs fewer barriers."""
    for algorithm in ALGORITHMS:
        deep = edge("tails", C=40)
        cases = [(deep, runnable(algorithm, deep)[-1])] if runnable(algorithm, deep) else kinds(algorithm)
        for layer, params in cases:
            for number, unit in enumerate(algorithm.units(layer, params)):
                if unit.shared:
                    yield from ((algorithm, layer, params, number, text) for text in mutants(unit.text))


def test_a_missing_barrier_is_caught() -> None:
    algorithm, layer, params, number, text = next(m for m in mutant_cases() if m[0].name == "gemm")
    assert caught(algorithm, layer, params, number, text)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_every_missing_barrier_and_wait_is_caught() -> None:
    survivors = [f"{m[0].name} on {m[1]}" for m in mutant_cases() if not caught(*m)]
    assert not survivors, survivors
