"""Libraries as candidates: the reasons when one is absent, and what is special when it is there.

That their answers are right is tested with every other algorithm's, where they are installed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import EPILOGUES, edge, operands

from autoconv.algorithm import Algorithm, Kernel
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts
from autoconv.tuning import planner, reference
from autoconv.tuning.lookup import Request
from autoconv.vendors.base import installed, release
from autoconv.vendors.onnxruntime import Onnxruntime
from autoconv.vendors.torch import Torch

DEVICE = CPU.current()
LAYER = edge("plain")
VENDORS = (Torch(), Onnxruntime())


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without any of the libraries."""
    for package in ("torch", "onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for remembered in (installed, planner._installed):
        remembered.cache_clear()
    yield
    for remembered in (installed, planner._installed):
        remembered.cache_clear()


def reasons(algorithm: Algorithm, layer: ConvLayer) -> set[str]:
    """Everything that is said against an algorithm's candidates on a layer."""
    return set(algorithm.unsupported(layer)) | {
        reason
        for candidate in algorithm.all(layer, DEVICE)
        for reason in algorithm.why_not(layer, DEVICE, candidate.params)
    }


@pytest.mark.usefixtures("absent")
def test_what_is_not_installed_says_so_and_is_out(tmp_path: Path) -> None:
    assert reasons(Torch(), LAYER) == {"torch is not installed"}
    assert reasons(Onnxruntime(), LAYER) == {"onnxruntime is not installed", "onnx is not installed"}
    with pytest.raises(PlanError, match="torch is not installed"):
        planner.plan(LAYER, "torch[format=nchw]", device=DEVICE, cache=TuningCache(tmp_path, system=None), vendors=True)


def test_versions_are_known_without_importing() -> None:
    code = (
        "import sys; from autoconv.vendors import ALGORITHMS; [a.version for a in ALGORITHMS['cpu']]; "
        "print({'torch', 'onnx', 'onnxruntime'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_versions_are_those_of_the_package_under_whatever_name_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, text in (
        ("made_up_runtime/__init__.py", ""),
        (
            "made_up_runtime_gpu-1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: made-up-runtime-gpu\nVersion: 1.2\n",
        ),
        ("made_up_runtime_gpu-1.2.dist-info/top_level.txt", "made_up_runtime\n"),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    assert release("no_such_runtime") == "absent"
    monkeypatch.syspath_prepend(tmp_path)
    assert release("made_up_runtime") == "1.2"


@pytest.mark.parametrize(
    ("algorithm", "layer", "reason"),
    [
        (
            Torch(),
            edge("asymmetric"),
            "padding: expected the same on both sides, as torch has no other, got ((0, 2), (1, 0))",
        ),
        (
            Torch(),
            edge("plain", dtype="float16"),
            "dtype: expected float32 or float64 or bfloat16, got float16",
        ),
        (
            Torch(),
            edge("plain", dtype="bfloat16", residual=True),
            "residual: expected none in bfloat16, to which torch rounds before it adds the residual",
        ),
        (Onnxruntime(), edge("plain", layout="NHWC"), "layout: expected NCHW, got NHWC"),
        (Onnxruntime(), edge("plain", dtype="float64"), "dtype: expected float32, got float64"),
        (Onnxruntime(), edge("plain", direction="wgrad"), "direction: expected fwd, got wgrad"),
    ],
)
def test_reasons_name_what_a_library_lacks(algorithm: Algorithm, layer: ConvLayer, reason: str) -> None:
    assert reason in reasons(algorithm, layer)


def test_unknown_parameters_are_reasons() -> None:
    assert "format: expected nchw or channels_last, got blocked" in Torch().why_not(
        LAYER, DEVICE, {"format": "blocked"}
    )
    assert "weights: expected constant or varying, got none" in Onnxruntime().why_not(
        LAYER, DEVICE, {"weights": "none"}
    )


def built(algorithm: Algorithm, layer: ConvLayer, **params: str) -> Kernel:
    """A kernel, where the library is installed."""
    for package in algorithm.packages:  # type: ignore[attr-defined]
        pytest.importorskip(package, reason=f"NOT CHECKED: {package} is not installed")
    assert algorithm.why_not(layer, DEVICE, params) == []
    return algorithm.build(layer, DEVICE, params)


def right(layer: ConvLayer, arrays: tuple[Any, ...], got: Any) -> bool:
    """Whether an answer agrees with the oracle's."""
    error = reference.error(got, reference.convolve(layer, *arrays), reference.magnitude(layer, *arrays))
    return bool(error <= Torch().bound(layer, {}))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("memory_format", ["nchw", "channels_last"])
@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_torch_in_every_layout_and_direction(direction: str, memory_format: str, layout: str) -> None:
    layer = edge("remainders", direction=direction, layout=layout)
    kernel = built(Torch(), layer, format=memory_format)
    a, b, *_ = arrays = operands(layer)
    if kernel.packed_bytes:
        kernel.pack(arrays[1], b := DEVICE.buffer(kernel.packed_bytes))
    out = DEVICE.empty(layer.output_shape, layer.numpy_dtype)
    kernel.run(a, b, out, None, None, DEVICE.buffer(0))
    assert right(layer, arrays, out)


def test_torch_keeps_the_users_thread_count_and_takes_read_only_arrays() -> None:
    kernel = built(Torch(), LAYER, format="nchw")
    torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    arrays = operands(LAYER)
    arrays[0].flags.writeable = False
    out, before = np.empty(LAYER.y_shape, np.float32), torch.get_num_threads()
    torch.set_num_threads(DEVICE.threads + 1)
    try:
        kernel.run(*arrays[:2], out, None, None, DEVICE.buffer(0))
        assert torch.get_num_threads() == DEVICE.threads + 1
    finally:
        torch.set_num_threads(before)
    assert right(LAYER, arrays, out)


def test_torch_keeps_to_the_layers_type_under_autocast() -> None:
    kernel = built(Torch(), LAYER, format="nchw")
    torch = pytest.importorskip("torch")
    arrays, out = operands(LAYER), np.empty(LAYER.y_shape, np.float32)
    with torch.autocast("cpu", torch.bfloat16):
        kernel.run(*arrays[:2], out, None, None, DEVICE.buffer(0))
    assert right(LAYER, arrays, out)


@pytest.mark.parametrize("weights", ["constant", "varying"])
@pytest.mark.parametrize(
    "epilogue", [n for n, e in EPILOGUES.items() if e.get("activation", "relu") in Onnxruntime.activations]
)
def test_onnxruntime_with_every_epilogue_and_padding(epilogue: str, weights: str) -> None:
    layer = edge("asymmetric", **EPILOGUES[epilogue])
    kernel = built(Onnxruntime(), layer, weights=weights)
    a, b, bias, residual = arrays = operands(layer)
    if kernel.packed_bytes:
        kernel.pack(arrays[1], b := DEVICE.buffer(kernel.packed_bytes))
    out = np.empty(layer.y_shape, np.float32)
    kernel.run(a, b, out, bias, residual, DEVICE.buffer(0))
    assert right(layer, arrays, out)


def test_onnxruntime_keeps_one_session_per_packed_buffer() -> None:
    kernel = built(Onnxruntime(), LAYER, weights="constant")
    a, b, *_ = operands(LAYER)
    out = np.empty(LAYER.y_shape, np.float32)
    packed = [DEVICE.buffer(kernel.packed_bytes) for _ in range(2)]
    kernel.pack(b, packed[0])
    kernel.pack(2 * b, packed[1])
    for buffer, factor in ((packed[0], 1), (packed[1], 2)):
        kernel.run(a, buffer, out, None, None, DEVICE.buffer(0))
        assert right(LAYER, (a, factor * b, None, None), out)
    kernel.pack(3 * b, packed[0])  # the same buffer, other filters
    kernel.run(a, packed[0], out, None, None, DEVICE.buffer(0))
    assert right(LAYER, (a, 3 * b, None, None), out)
    kernel.run(a, packed[1].copy(), out, None, None, DEVICE.buffer(0))  # a buffer it has not packed itself
    assert right(LAYER, (a, 2 * b, None, None), out)
    del packed, buffer
    gc.collect()
    assert kernel._sessions == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", VENDORS, ids=lambda algorithm: algorithm.name)
def test_several_threads_at_once(algorithm: Algorithm) -> None:
    params = next(iter(algorithm.candidates(LAYER, DEVICE)))
    kernel = built(algorithm, LAYER, **{name: str(value) for name, value in params.items()})
    arrays = operands(LAYER)
    weights = arrays[1]
    if kernel.packed_bytes:
        kernel.pack(arrays[1], weights := DEVICE.buffer(kernel.packed_bytes))
    outs = [np.empty(LAYER.y_shape, np.float32) for _ in range(4)]

    def work(out: Any) -> None:
        for _ in range(20):
            kernel.run(arrays[0], weights, out, None, None, DEVICE.buffer(0))

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(right(LAYER, arrays, out) for out in outs)


def test_a_plan_names_them_only_when_allowed(tmp_path: Path) -> None:
    """`vendors=False` leaves both out, whatever is installed."""
    made = planner.plan(LAYER, "heuristic", device=DEVICE, cache=TuningCache(tmp_path, system=None), vendors=False)
    for algorithm in VENDORS:
        for candidate in algorithm.all(LAYER, DEVICE):
            assert any("that the option vendors allows" in reason for reason in made.reasons[str(candidate)])


@pytest.mark.parametrize("allowed", [None, frozenset(), frozenset({"torch"})])
def test_limits_a_request_and_a_list_of_candidates_mean_the_same(
    tmp_path: Path, allowed: frozenset[str] | None
) -> None:
    """None is all of them, to whoever is told it."""
    limits = Limits(vendors=allowed)
    request = Request(LAYER, DEVICE, TuningCache(tmp_path, system=None), limits, None, False, None)
    for algorithm in request.offered:
        may = not limits.why_not(Facts("1", time=1.0, vendor=algorithm.vendor))
        refused = any(
            "that the option vendors allows" in reason
            for candidate, against in request.candidate_set.reasons.items()
            if candidate.algorithm == algorithm.name
            for reason in against
        )
        assert may == (algorithm.name in request.allowed) == (not refused)
        assert may == (algorithm.vendor is None or allowed is None or algorithm.vendor in allowed)
