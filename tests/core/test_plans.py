"""Running a plan: operands checked, copied, packed; workspaces per thread."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from layers import operands

from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.gemm import NumpyGemm
from autoconv.errors import ArrayError
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts, Race
from autoconv.tuning import reference
from autoconv.tuning.planner import plan

pytestmark = pytest.mark.usefixtures("few_families")

LAYER = ConvLayer(N=2, C=4, H=9, W=8, K=6, R=3, S=3, padding=1)


def heuristic(cache: TuningCache, **changes: object) -> Plan:
    return plan(LAYER.replace(**changes), "heuristic", cache=cache)


class Foreign:
    """An array of another library: it speaks DLPack, and its namespace can read it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array_namespace__(self) -> type:
        return ForeignLibrary

    def __dlpack__(self, **kwargs: object) -> object:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class ForeignLibrary:
    @staticmethod
    def from_dlpack(array: np.ndarray) -> Foreign:
        return Foreign(np.from_dlpack(array))


def test_copies_and_pickles_compute_the_same() -> None:
    made = plan(LAYER, "direct", weights="constant", workspace_limit=10**9, vendors=False)
    x, w, _, _ = operands(LAYER)
    packed = made.pack(w)
    assert copy.copy(made) is copy.deepcopy(made) is made
    other, weights = pickle.loads(pickle.dumps((made, packed)))
    assert (other.layer, other.device, other.candidate) == (made.layer, made.device, made.candidate)
    assert (other.limits, other.source, other.timed) == (made.limits, "user", 0)
    np.testing.assert_array_equal(other.run(x, weights), made.run(x, packed))


def test_a_pickle_outlives_the_records_of_its_error(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path, system=None)
    bound = plan(LAYER, "numpy.gemm", vendors=False)
    packed = NumpyGemm().packed_bytes(LAYER, CPU.current(), bound.candidate.params)
    sizes = {"workspace": bound.workspace_bytes, "packed": packed}
    facts = Facts(NumpyGemm().version, time=1.0, samples=9, error=1e-12, **sizes)
    race = Race("1" * 32, "2026-01-01T00:00:00+00:00", CPU.current().versions, False, None, {bound.candidate: facts})
    cache.add(LAYER.key(), CPU.current().key, race)
    made = plan(LAYER, str(bound.candidate), vendors=False, tolerance=1e-11, cache=cache)
    assert pickle.loads(pickle.dumps(made)).candidate == made.candidate


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_what_speaks_dlpack_comes_in_and_the_same_kind_goes_out(cache: TuningCache, direction: str) -> None:
    made = heuristic(cache, direction=direction)
    a, b, _, _ = operands(made.layer)
    out = made.run(Foreign(a), Foreign(b))
    assert isinstance(out, Foreign)
    np.testing.assert_array_equal(out.array, made.run(a, b))


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1e-5), ("float64", 1e-13), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)]
)
def test_out_is_written_and_returned(cache: TuningCache, dtype: str, most: float) -> None:
    made = heuristic(cache, dtype=dtype)
    a, b, _, _ = operands(made.layer)
    out = np.empty(made.layer.y_shape, made.layer.numpy_dtype)
    assert made.run(a, b, out=out) is out
    want = reference.convolve(made.layer, a, b)
    assert reference.error(out, want, reference.magnitude(made.layer, a, b)) < most


def test_arrays_that_are_not_contiguous_or_aligned_work(cache: TuningCache) -> None:
    made = heuristic(cache)
    a, b, _, _ = operands(LAYER)
    want = made.run(a, b)
    strided = np.repeat(a, 2, axis=3)[..., ::2]
    crooked = np.frombuffer(b"\0" + b.tobytes(), np.uint8)[1:].view(np.float32).reshape(b.shape)
    assert not crooked.flags.aligned
    np.testing.assert_array_equal(made.run(strided, crooked), want)
    np.testing.assert_array_equal(made.run(np.asfortranarray(a), b), want)


def test_the_epilogue_is_applied(cache: TuningCache) -> None:
    made = heuristic(cache, bias=True, residual=True, activation="relu")
    a, b, bias, residual = operands(made.layer)
    got = made.run(a, b, bias, residual)
    want = reference.convolve(made.layer, a, b, bias, residual)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert (got == 0).any()
    assert (got > 0).any()


@pytest.mark.parametrize("bias", [False, True])
def test_slopes_are_an_operand_of_their_own(cache: TuningCache, bias: bool) -> None:
    made = heuristic(cache, bias=bias, residual=True, activation="prelu")
    a, b, values, residual = operands(made.layer)
    *first, slope = values.reshape(1 + bias, -1)
    got = made.run(a, b, *first, residual=residual, slope=slope)
    np.testing.assert_allclose(got, reference.convolve(made.layer, a, b, values, residual), atol=1e-4)
    with pytest.raises(ArrayError, match="slope: expected an array, as the layer has one"):
        made.run(a, b, *first, residual=residual)
    with pytest.raises(ArrayError, match=r"slope: expected float32 \(6,\) .* got float32 \(1,\)"):
        made.run(a, b, *first, residual=residual, slope=slope[:1])


REFUSED = [
    ({"x": np.zeros((2, 4, 9, 9), np.float32)}, "x: expected float32 (2, 4, 9, 8) for the NCHW layer fwd-"),
    ({"x": np.zeros((2, 4, 9, 8))}, "got float64 (2, 4, 9, 8)"),
    ({"x": np.zeros((2, 9, 8, 4), np.float32)}, "got float32 (2, 9, 8, 4)"),
    ({"x": np.zeros((2, 4, 9, 8), ">f4")}, "x: expected float32 (2, 4, 9, 8) for the NCHW layer"),
    ({"x": [[1.0]]}, "x: expected an array of NumPy, or one that speaks DLPack, got list"),
    (
        {"x": np.ma.masked_array(np.zeros((2, 4, 9, 8), np.float32))},
        "x: expected an array without a mask (array.filled() gives one), got MaskedArray",
    ),
    ({"w": np.zeros((6, 4, 3, 3), ml_dtypes.bfloat16)}, "got bfloat16 (6, 4, 3, 3)"),
    ({"w": None}, "w: expected an array of NumPy, or one that speaks DLPack, got NoneType"),
    ({"bias": np.zeros(6, np.float32)}, "bias: expected None, as the layer has none"),
    ({"residual": np.zeros((2, 6, 9, 8), np.float32)}, "residual: expected None, as the layer has none"),
    ({"slope": np.zeros(6, np.float32)}, "slope: expected None, as the layer has none"),
    ({"out": np.zeros((2, 6, 9, 9), np.float32)}, "out: expected float32 (2, 6, 9, 8) for y of the NCHW layer"),
    ({"out": np.zeros((2, 6, 8, 9), np.float32).swapaxes(2, 3)}, "out: expected a contiguous array"),
    ({"out": "there"}, "out: expected an array of NumPy, or one that speaks DLPack, got str"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_arrays_that_do_not_fit_are_refused_by_name(cache: TuningCache, changes: dict, words: str) -> None:
    made = heuristic(cache)
    arguments = {"x": np.zeros(LAYER.x_shape, np.float32), "w": np.zeros(LAYER.w_shape, np.float32)}
    with pytest.raises(ArrayError) as caught:
        made.run(**(arguments | changes))
    assert words in str(caught.value)


def test_a_missing_operand_read_only_and_overlapping_outputs_are_refused(cache: TuningCache) -> None:
    made = heuristic(cache, bias=True, K=4, residual=True)
    a, b, bias, residual = operands(made.layer)
    with pytest.raises(ArrayError, match="residual: expected an array, as the layer has one"):
        made.run(a, b, bias)
    with pytest.raises(ArrayError, match="out: expected memory of its own, got an array that overlaps an operand"):
        made.run(a, b, bias, residual, out=a)
    with pytest.raises(ArrayError, match="overlaps bias, residual or slope"):
        made.run(a, b, bias, residual, out=residual)
    out = np.zeros(made.layer.y_shape, np.float32)
    out.flags.writeable = False
    with pytest.raises(ArrayError, match="out: expected a writable array"):
        made.run(a, b, bias, residual, out=out)


@pytest.mark.parametrize("candidate", ["numpy.winograd", "numpy.direct"])
def test_packed_weights_serve_in_place_of_w(cache: TuningCache, candidate: str) -> None:
    made = plan(LAYER, candidate, weights="constant", cache=cache)
    a, b, _, _ = operands(LAYER)
    weights = made.pack(b)
    want = made.run(a, b)
    b[...] = 0  # packed weights are a copy
    np.testing.assert_array_equal(made.run(a, weights), want)
    same = plan(LAYER, str(made.candidate), weights="varying", cache=cache)
    np.testing.assert_array_equal(same.run(a, weights), want)
    assert same.workspace_bytes >= made.workspace_bytes


def test_packed_weights_are_bound_to_their_plan(cache: TuningCache) -> None:
    a, b, _, _ = operands(LAYER)
    weights = plan(LAYER, "numpy.winograd", cache=cache).pack(b)
    with pytest.raises(ArrayError, match=r"w: expected weights packed for numpy\.direct of .*, got .* numpy\.winograd"):
        plan(LAYER, "numpy.direct", cache=cache).run(a, weights)
    with pytest.raises(ArrayError, match="wgrad computes the filters' gradient"):
        heuristic(cache, direction="wgrad").pack(b)
    with pytest.raises(ArrayError, match=r"dy: expected an array, got packed weights: wgrad takes \(x, dy\)"):
        heuristic(cache, direction="wgrad").run(a, weights)
    winograd = plan(LAYER.replace(K=4), "numpy.winograd[m=6,r=3]", cache=cache)
    packed = winograd.pack(b[:4])
    out = packed.buffer[: a.nbytes].view(np.float32).reshape(winograd.layer.y_shape)
    with pytest.raises(ArrayError, match="overlaps an operand"):
        winograd.run(a, packed, out=out)


def test_threads_share_a_plan(cache: TuningCache) -> None:
    made = plan(LAYER, "numpy.gemm", cache=cache)
    a, b, _, _ = operands(LAYER)
    want = made.run(a, b)
    right: list[bool] = []

    def work(seed: int) -> None:
        x = a * np.float32(seed)
        right.extend(np.allclose(made.run(x, b), seed * want, atol=1e-4 * seed) for _ in range(50))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_values_reach_their_outputs_and_no_others(cache: TuningCache, value: float) -> None:
    layer = LAYER.replace(activation="relu", bias=True)
    a, b, bias, _ = operands(layer)
    a[1, 2, 4, 4] = value
    made = plan(layer, "numpy.direct", cache=cache)
    got = made.run(a, b, bias)
    clean = made.run(np.nan_to_num(a, nan=0, posinf=0, neginf=0), b, bias)
    reached = np.zeros(layer.y_shape, bool)
    reached[1, :, 3:6, 3:6] = True
    np.testing.assert_array_equal(got[~reached], clean[~reached])
    if np.isnan(value):
        assert np.isnan(got[reached]).all()
    else:  # ReLU turns minus infinity into zero
        assert np.isin(got[reached], [np.inf, 0.0]).all()
        assert np.isinf(got[reached]).any()


def test_a_plan_that_runs_within_its_own_run_gives_both_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a signal's handler runs it: both have packed filters and a workspace of their own."""
    layer = ConvLayer(N=1, C=8, H=12, W=12, K=16, R=3, S=3, padding=1)
    made = plan(layer, "numpy.winograd[m=2,r=3]")
    x, w = np.ones(layer.x_shape, np.float32), np.ones(layer.w_shape, np.float32)
    want, inner, run = made.run(x, w), [], made.kernel.run
    assert made.kernel.packed_bytes

    def handled(*arguments: object) -> None:
        if not inner:
            inner.append(None)
            inner[0] = made.run(x, 2 * w)
        run(*arguments)

    monkeypatch.setattr(made.kernel, "run", handled)
    np.testing.assert_array_equal(made.run(x, w), want)
    np.testing.assert_array_equal(inner[0], 2 * want)
    kept = [*made._workspaces.values(), *made._packed.values()]
    made.run(x, w)
    assert [*map(id, kept)] == [*map(id, [*made._workspaces.values(), *made._packed.values()])], (
        "taken out and put back"
    )
