"""Verification catches every planted fault, and its own oracle's faults too."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from faulty import FAULTS, SIZE, Faulty, FaultyCPU, measure

from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.layer import ConvLayer
from autoconv.tuning import reference
from autoconv.tuning.measurement import Measurement
from autoconv.tuning.verification import Verifier, WrongResultError, check_convolution

LAYER = ConvLayer(N=2, C=4, H=9, W=8, K=6, R=3, S=2, padding=((1, 0), (1, 1)), stride=(2, 1), groups=2, bias=True)

REASONS = {
    "overrun": "wrote outside its output",
    "scribble": "wrote outside its workspace",
    "input": "wrote to its input a",
    "unwritten": "left 1 of",
    "wrong": "wrong result: error",
    "raises": "ValueError: no such thing",
}


@pytest.mark.parametrize("fault", REASONS)
def test_a_fault_is_recorded_with_its_reason_and_the_rest_goes_on(fault: str) -> None:
    device = FaultyCPU.having(fault, "none")
    facts = measure(LAYER, device, [Candidate(f"faulty.{fault}"), Candidate("faulty.none")])
    failure = facts[Candidate(f"faulty.{fault}")].failure
    assert failure is not None
    assert REASONS[fault] in failure
    assert facts[Candidate("faulty.none")].failure is None
    assert facts[Candidate("faulty.none")].error <= 2e-6


def test_a_written_residual_is_named_where_there_is_no_bias() -> None:
    layer, device = LAYER.replace(bias=False, residual=True), FaultyCPU.having("none")
    kernel = Faulty("none").build(layer, device, {})
    kernel._fault = lambda kernel, a, out, workspace: verifier.residual.fill(1.0)  # type: ignore[attr-defined]
    verifier = Verifier(layer, device)
    with pytest.raises(WrongResultError, match="wrote to its input residual"):
        verifier.check(kernel, verifier.b)


def test_a_workspace_for_which_there_is_no_memory_costs_its_candidate_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = FaultyCPU.buffer

    def scarce(self: FaultyCPU, nbytes: int) -> Any:
        if nbytes > 1 << 20:
            raise MemoryError(f"no {nbytes} bytes")
        return buffer(self, nbytes)

    device = FaultyCPU.having("none")
    measurement = Measurement(LAYER, device)
    monkeypatch.setattr(FaultyCPU, "buffer", scarce)
    monkeypatch.setattr(Faulty, "workspace_bytes", lambda *_: 1 << 30)
    facts = measurement.enter([Candidate("faulty.none"), Candidate("numpy.direct")])
    assert facts[Candidate("faulty.none")].starved
    assert measurement.finish()[Candidate("numpy.direct")].timed


def test_candidates_find_their_own_scratch_memory_output_and_input_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[list[int]] = []
    filters: list[list[int]] = []

    def settle(self: FaultyCPU, *arrays: Any, **others: Any) -> None:
        warm.append([array.nbytes for array in arrays])
        filters.append([array.nbytes for array in others["filters"]])

    monkeypatch.setattr(FaultyCPU, "settle", settle)
    needs = {"numpy.direct": NumpyDirect().workspace_bytes(LAYER, CPU.current(), {}), "faulty.none": SIZE}
    measure(LAYER, FaultyCPU.having("none"), [Candidate(name) for name in needs])
    arrays = [4 * np.prod(shape) for shape in (LAYER.y_shape, LAYER.x_shape)]
    assert {tuple(found) for found in warm} == {(room, *arrays) for room in needs.values()}
    assert {tuple(found) for found in filters} == {(4 * np.prod(LAYER.w_shape),)}


def test_a_candidate_that_gives_other_bits_is_not_deterministic() -> None:
    device = FaultyCPU.having("unsteady", "none")
    facts = measure(LAYER, device, [Candidate("faulty.unsteady"), Candidate("faulty.none")])
    assert not facts[Candidate("faulty.unsteady")].deterministic
    assert facts[Candidate("faulty.none")].deterministic


def test_no_more_are_prepared_when_time_is_up_but_the_fewest_that_work_in_any_case() -> None:
    candidates = [Candidate(f"faulty.{fault}") for fault in ("none", "raises", "slow", "unsteady")]
    device = FaultyCPU.having("none", "raises", "slow", "unsteady")
    for seconds, fewest, late in ((0.0, 2, ["unsteady"]), (0.0, 3, []), (60.0, 2, []), (None, 2, [])):
        measurement = Measurement(LAYER, device, preparing=seconds, fewest=fewest)
        entered = measurement.enter(candidates)
        facts = measurement.finish()
        assert {str(c) for c, found in facts.items() if found.unreached} == {f"faulty.{fault}" for fault in late}
        assert facts.keys() == entered.keys() == set(candidates)
        assert all(found.timed for c, found in facts.items() if str(c)[7:] not in ("raises", *late))
        assert all("to prepare others took 0." in str(found.failure) for found in facts.values() if found.unreached)


def test_one_wrong_element_in_a_million_is_found() -> None:
    layer = ConvLayer(N=1, C=1, H=1000, W=400, K=3, R=1, S=1)
    device = FaultyCPU.having("wrong")
    verifier = Verifier(layer, device)
    kernel = Faulty("wrong").build(layer, device, {})
    error, _ = verifier.check(kernel, verifier.b)
    assert np.prod(layer.y_shape) > 1e6
    assert error > 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu", "sigmoid"])
def test_a_lost_channel_of_a_narrow_type_is_no_rounding(dtype: str, activation: str | None) -> None:
    layer = ConvLayer(N=1, C=512, H=6, W=6, K=64, R=3, S=3, padding=1, dtype=dtype, activation=activation)
    verifier = Verifier(layer, CPU.current())
    family = NumpyDirect()
    kernel = family.build(layer, verifier.device, {})
    error, _ = verifier.check(kernel, verifier.b)
    assert error <= verifier.allowed(family, {})
    fewer = verifier.b.copy()
    fewer[:, -1] = 0
    error, _ = verifier.check(kernel, fewer)
    assert error > verifier.allowed(family, {})


def test_every_fault_is_tested_somewhere() -> None:
    elsewhere = {"none", "unsteady", "dies", "dies_later", "killed", "hangs", "slow", "exits"}
    assert set(FAULTS) == set(REASONS) | elsewhere


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_oracle_is_accepted_and_any_wrong_element_of_it_is_not(direction: str, layout: str, groups: int) -> None:
    layer = ConvLayer(
        N=2, C=4, H=7, W=8, K=8, R=3, S=2, stride=(1, 2), padding=((1, 2), (0, 1)), dilation=(2, 1),
        groups=groups, direction=direction, layout=layout, dtype="float64",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(-1, 1, shape) for shape in layer.input_shapes)
    out = reference.convolve(layer, a, b)
    magnitude = float(reference.magnitude(layer, a, b).max())
    check_convolution(layer, a, b, out, magnitude)
    for position in range(0, out.size, 7):
        spoiled = out.copy()
        spoiled.reshape(-1)[position] += 1e-6
        with pytest.raises(WrongResultError):
            check_convolution(layer, a, b, spoiled, magnitude)


class Remote:
    """An array that, as CuPy's, is none of NumPy's: no function of NumPy takes it, nor is it indexed by NumPy's."""

    __array_ufunc__ = None

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        assert not any(isinstance(part, np.ndarray) for part in parts)
        return remote(self.array[tuple(part.array if isinstance(part, Remote) else part for part in parts)])

    def __setitem__(self, index: Any, value: Remote) -> None:
        self.array[index] = value.array

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.array, name)
        return functools.partial(called, found) if callable(found) else found

    def get(self) -> np.ndarray:
        return self.array

    def __bool__(self) -> bool:
        return bool(self.array)

    def __float__(self) -> float:
        return float(self.array)

    def __int__(self) -> int:
        return int(self.array)


def operator(name: str) -> Any:
    return lambda self, *others: called(getattr(self.array, name), *others)


for name in ("add", "sub", "mul", "le", "invert", "iadd"):
    setattr(Remote, f"__{name}__", operator(f"__{name}__"))


def remote(value: Any) -> Any:
    return Remote(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def called(function: Any, *arguments: Any, **options: Any) -> Any:
    def local(value: Any) -> Any:
        return [local(v) for v in value] if isinstance(value, list) else getattr(value, "array", value)

    return remote(function(*map(local, arguments), **options))


class Far:
    """CuPy, as far as it is NumPy on arrays that lie elsewhere; only `asarray` takes NumPy's."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            assert name == "asarray" or not any(isinstance(argument, np.ndarray) for argument in arguments)
            return called(getattr(np, name), *arguments, **options)

        return call


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_gpus_arrays_are_checked_where_they_lie(direction: str, layout: str) -> None:
    layer = LAYER.replace(bias=False, direction=direction, layout=layout, dtype="float64")
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(-1, 1, shape) for shape in layer.input_shapes)
    out = reference.convolve(layer, a, b)
    magnitude = float(reference.magnitude(layer, a, b).max())
    check_convolution(layer, Remote(a), Remote(b), Remote(out), magnitude, Far())
    for position in (0, out.size // 2 + 1):
        spoiled = out.copy()
        spoiled.reshape(-1)[position] += 1e-6
        with pytest.raises(WrongResultError, match="direct itself"):
            check_convolution(layer, Remote(a), Remote(b), Remote(spoiled), magnitude, Far())
