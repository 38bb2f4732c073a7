"""The CUDA device itself on a CuPy of NumPy arrays: dispatch, arrays, launches, streams and graphs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hosts import LAYER, cache, cupy, given, right
from layers import edge, operands
from simt.cases import only
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy, Stream, ndarray

import autoconv
from autoconv.cli import main
from autoconv.cuda import device as module
from autoconv.cuda import hardware
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.device import CUDA
from autoconv.cuda.libraries import algorithm as vendor
from autoconv.errors import ArrayError, PlanError
from autoconv.layer import DTYPES
from autoconv.records.cache import TuningCache
from autoconv.registry import device_of, resolve
from autoconv.tuning.planner import plan
from autoconv.tuning.reference import convolve, error, magnitude

__all__ = ["cache", "cupy"]  # fixtures

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


# Which device


def test_a_device_is_named_numbered_or_the_arrays_own(cupy: FakeCuPy) -> None:
    assert resolve("cuda") == resolve("cuda:0") == CUDA(0)
    assert resolve("cuda:1") == resolve(cupy.cuda.Device(1)) == CUDA(1)
    assert resolve(None) == resolve("cpu") == autoconv.CPU.current()
    with cupy.cuda.Device(1):
        assert resolve("cuda") == CUDA(1)
        assert device_of(cupy.empty((2,))) == CUDA(1)
    assert device_of(np.zeros(3)) == autoconv.CPU.current()
    tensor = SimpleNamespace(__dlpack_device__=lambda: (2, 1))
    assert device_of(tensor) == CUDA(1)
    for wrong in ("gpu", "cuda:x", "cuda:-1", 3, ""):
        with pytest.raises(PlanError, match="expected a Device, 'cpu', 'cuda' or 'cuda:N'"):
            resolve(wrong)
    with pytest.raises(PlanError, match="no CUDA device 2: expected 0 to 1, which the driver sees"):
        resolve("cuda:2")


def test_the_functions_run_where_their_arrays_lie(cupy: FakeCuPy, cache: TuningCache) -> None:
    x, w, *_ = given(cupy, LAYER, gpu=1)
    y = autoconv.conv2d(x, w, padding=1, mode="direct", cache=cache)
    assert type(y) is ndarray
    assert y.gpu == 1
    assert right(LAYER, y)
    assert cupy.current == 0  # as the caller left it
    for direction, call, size in (
        ("dgrad", autoconv.conv2d_dgrad, {"input_size": (LAYER.H, LAYER.W)}),
        ("wgrad", autoconv.conv2d_wgrad, {"filter_size": (3, 3)}),
    ):
        layer = LAYER.replace(direction=direction)
        a, b, *_ = given(cupy, layer)
        assert right(layer, call(a, b, padding=1, mode="direct", cache=cache, **size))
    a, b, *_ = given(cupy, LAYER.replace(direction="dgrad"))
    bias = cupy.asarray(np.ones(LAYER.C, np.float32))
    back = autoconv.conv_transpose2d(a, b, bias, padding=1, mode="direct", cache=cache)
    assert right(LAYER.replace(direction="dgrad"), back - 1)
    assert {"direct"} == set(cupy.launches)


def test_a_bias_is_added_on_the_gpu_of_its_array(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYER.replace(direction="dgrad")
    a, b, *_ = given(cupy, layer, gpu=1)
    with cupy.cuda.Device(1):
        bias = cupy.asarray(np.ones(LAYER.C, np.float32))
    added: list[int] = []

    def add(y: ndarray, other: Any) -> ndarray:
        added.append(cupy.current)
        return np.add(y, other, out=y)

    monkeypatch.setattr(ndarray, "__iadd__", add)
    back = autoconv.conv_transpose2d(a, b, bias, padding=1, mode="direct", cache=cache)
    assert right(layer, back - 1)
    assert (added, cupy.current) == ([1], 0)


def test_bfloat16_arrays_are_taken(cupy: FakeCuPy, cache: TuningCache) -> None:
    layer = LAYER.replace(dtype="bfloat16")
    x, w, *_ = given(cupy, layer)
    y = autoconv.conv2d(x, w, padding=1, mode="direct", cache=cache)
    assert y.dtype == layer.numpy_dtype
    assert error(y, convolve(layer, *operands(layer)), magnitude(layer, *operands(layer))) <= 2.0**-8


def test_the_command_takes_the_device(
    cupy: FakeCuPy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "direct")
    monkeypatch.setattr(hardware, "measured_peak", lambda index, dtype: 1e12)
    net = tmp_path / "net.yaml"
    net.write_text("{name: tiny, layers: [{name: one, C: 2, H: 3, K: 2, R: 1}]}", encoding="utf-8")
    assert main(["tune", str(net), "--device", "cuda:1", "--no-isolate"]) == 0
    assert "on Fake GPU; peak: 1000 GFLOP/s in float32" in capsys.readouterr().out
    assert main(["explain", str(net), "--device", "cuda"]) == 0  # as fast as its like
    assert "direct, from cache" in capsys.readouterr().out
    assert main(["show", "--device", "cuda"]) == 0
    assert "cuda-Fake_GPU-sm90-4SMs" in capsys.readouterr().out
    assert main(["info", "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["compute_capability"] == 90
    assert main(["info", "--device", "cuda"]) == 0
    assert main(["tune", str(net), "--device", "cuda:7"]) == 2
    assert "--device cuda:7: no CUDA device 7: expected 0 to 1, which the driver sees" in capsys.readouterr().err


# Arrays


def test_what_is_wrong_with_arrays_is_said(cupy: FakeCuPy, cache: TuningCache) -> None:
    x, w, *_ = given(cupy, LAYER)
    made = plan(LAYER, "direct", device="cuda", cache=cache)
    elsewhere = given(cupy, LAYER, gpu=1)[1]
    host = np.zeros(LAYER.x_shape, np.float32)
    with pytest.raises(
        ArrayError, match=r"x: expected an array on GPU 0, got ndarray in host memory: cupy.asarray copies it"
    ):
        made.run(host, w)
    with pytest.raises(ArrayError, match="w: expected an array on GPU 0, got one on GPU 1"):
        made.run(x, elsewhere)
    with pytest.raises(ArrayError, match="w: expected an array on GPU 0, got one on GPU 1"):
        autoconv.conv2d(x, elsewhere, padding=1, cache=cache)
    with pytest.raises(ArrayError, match="out: expected an array on GPU 0, got one on GPU 1"):
        made.run(x, w, out=given(cupy, LAYER, gpu=1)[0])
    with pytest.raises(ArrayError, match="list"):
        made.run([1.0], w)  # type: ignore[arg-type]
    both = cupy.empty((2, *LAYER.y_shape))
    both[0] = x
    with pytest.raises(ArrayError, match="overlaps an operand"):
        made.run(both[0], w, out=both.reshape(-1)[16 : 16 + both[0].size].reshape(LAYER.y_shape))
    with pytest.raises(ArrayError, match="out: expected a contiguous array"):
        made.run(x, w, out=cupy.empty((*LAYER.y_shape[:3], 2 * LAYER.Q))[..., ::2])
    assert not cupy.launches


def test_a_view_that_is_not_contiguous_is_copied_on_its_own_gpu(cupy: FakeCuPy, cache: TuningCache) -> None:
    x, w, *_ = given(cupy, LAYER, gpu=1)
    made = plan(LAYER, "direct", device="cuda:1", cache=cache)
    turned = x.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)
    assert not turned.flags.c_contiguous
    assert right(LAYER, made.run(turned, w))


class Tensor:
    """An array of another library, which writes down the launches before it takes one, and the GPU selected then."""

    def __init__(self, array: ndarray, cupy: FakeCuPy, taken: list[tuple[int, int]]) -> None:
        self.array, self.cupy, self.taken = array, cupy, taken

    def __dlpack_device__(self) -> tuple[int, int]:
        return module.DLPACK_CUDA, self.array.gpu

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=self._take)

    def _take(self, array: ndarray) -> Tensor:
        self.taken.append((len(self.cupy.launches), self.cupy.current))
        return Tensor(array, self.cupy, self.taken)


def test_another_library_waits_for_what_is_written_to_its_array(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy, "from_dlpack", lambda tensor: tensor.array, raising=False)
    x, w, *_ = given(cupy, LAYER, gpu=1)
    taken: list[tuple[int, int]] = []
    with cupy.cuda.Device(1):
        own = cupy.empty(LAYER.y_shape)
    out = Tensor(own, cupy, taken)
    made = plan(LAYER, "direct", device="cuda:1", cache=cache)
    assert made.run(x, w, out=out) is out
    assert right(LAYER, own)
    own[...] = 0
    assert autoconv.conv2d(x, w, padding=1, mode="direct", cache=cache, out=out) is out
    assert right(LAYER, own)
    for y in (
        made.run(Tensor(x, cupy, taken), w),
        autoconv.conv2d(Tensor(x, cupy, taken), w, padding=1, mode="direct", cache=cache),
    ):
        assert right(LAYER, y.array)
    made.run(x, w, out=own)  # which is CuPy's
    assert taken == [(1, 1), (2, 1), (3, 1), (4, 1)]


# Launches


def test_how_a_kernel_is_handed_to_cupy(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    """None stands for a null pointer, and shared memory beyond 48 KiB is asked for."""
    calls: list[Any] = []

    class Function:
        ptr = 1234

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            calls.append((grid, block, arguments, shared_mem))

    monkeypatch.setattr(module, "_function", lambda *_: Function())
    unit = Unit(
        "f", "common/common.cuh", edge("one"), grid=(5, 2, 1), threads=64, blocks=1, shared=50 << 10, dynamic=50 << 10
    )
    array = np.zeros(3)
    CUDA(0).load(unit)(array, None)
    assert cupy.attributes_set == [(1234, 8, 50 << 10)]
    ((grid, block, (first, second), shared),) = calls
    assert (grid, block, shared) == ((5, 2, 1), (64, 1, 1), 50 << 10)
    assert first is array
    assert second is None
    for held, launched in ((3, 8), (1, 4), (0, 4)):  # of 2 designed for, on 4 multiprocessors
        cupy.held = held
        calls.clear()
        CUDA(0).load(replace(unit, grid=(50, 1, 1), blocks=2, persistent=True))(array, None)
        assert calls[0][0] == (launched, 1, 1)


def test_each_stream_has_its_own_scratch_and_each_capture_too(cupy: FakeCuPy, cache: TuningCache) -> None:
    layer = edge("plain", N=1, C=8, K=8)
    x, w, *_ = given(cupy, layer)
    made = plan(layer, "winograd", device="cuda", cache=cache)  # which has a workspace, and packs its filters
    made.run(x, w)
    made.run(x, w)
    default = CUDA(0).stream()
    assert list(made._workspaces) == list(made._packed) == [default]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        made.run(x, w)
        own = CUDA(0).stream()
        assert list(made._workspaces) == [default, own]
        out = cupy.empty(layer.y_shape)
        stream.begin_capture()
        made.run(x, w, out=out)
        strided = x.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)
        made.run(strided, w, out=out)
        graph = stream.end_capture()
        stream.begin_capture()
        made.run(x, w, out=out)
        stream.end_capture()
    assert list(made._workspaces) == list(made._packed) == [default, own, -1, -2]
    assert len({CUDA(0).address(array) for array in (*made._workspaces.values(), *made._packed.values())}) == 8
    assert len(made._pinned) == 1  # the copy of the strided input
    out[...] = np.nan
    x[...] = operands(layer)[0]
    graph.launch()
    assert error(out, convolve(layer, *operands(layer)), magnitude(layer, *operands(layer))) <= 3e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_in_place_of_a_bias_are_there_for_every_stream(
    dtype: str, cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[tuple[int, bool]] = []
    zeros = cupy.zeros

    def fill(shape: Any, dtype: Any) -> ndarray:
        filled.append((cupy.current_stream.ptr, cupy.pooled))
        return zeros(shape, dtype)

    monkeypatch.setattr(cupy, "zeros", fill)
    layer = LAYER.replace(dtype=dtype, K=6)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        found = vendor._no_bias(CUDA(0), layer)
    assert (found.shape, found.dtype) == ((6,), layer.numpy_dtype)
    assert not np.asarray(found.view("uint8")).any()
    ((filler, pooled),) = filled
    assert filler != stream.ptr
    assert not pooled  # another stream would get the memory from the pool while a kernel still reads it


def test_threads_with_default_streams_of_their_own_share_no_scratch(cupy: FakeCuPy, cache: TuningCache) -> None:
    """All of these streams have the address 2."""
    layer = edge("plain", N=1, C=8, K=8)
    x, w, *_ = given(cupy, layer)
    made = plan(layer, "winograd", device="cuda", cache=cache)
    cupy.current_stream = Stream(cupy, 2)
    made.run(x, w)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(made.run, x, w).result()
    for kept in (made._workspaces, made._packed):
        assert len({CUDA(0).address(array) for array in kept.values()}) == 2


def test_a_run_neither_waits_nor_allocates(cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = edge("plain", N=1, C=8, K=8)
    x, w, *_ = given(cupy, layer)
    out = cupy.empty(layer.y_shape)
    made = plan(layer, "winograd", device="cuda", cache=cache)
    made.run(x, w, out=out)

    def forbidden(*_: object) -> None:
        raise AssertionError("called by run")

    monkeypatch.setattr(cupy, "empty", forbidden)
    monkeypatch.setattr(cupy.cuda.runtime, "deviceSynchronize", forbidden)
    monkeypatch.setattr("simt.fake_cupy.Stream.synchronize", forbidden)
    assert made.run(x, w, out=out) is out


def test_tuning_times_graphs_on_the_device_that_is_named(
    cupy: FakeCuPy, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "direct")
    made = plan(edge("one"), device="cuda:1", cache=cache, vendors=False)
    assert made.source == "profile"
    assert made.timings["direct"] > 0
    assert cupy.current == 0
