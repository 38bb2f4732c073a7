"""The model by which CUDA candidates are estimated: rounds, limits, and what it says of GPUs by their data sheets."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.bench.gpu.agenda import targets
from autoconv.bench.gpu.predicted import GPUS, DatasheetGPU, predictions
from autoconv.bench.gpu.report import markdown
from autoconv.cuda.common.model import COPIED, LAUNCH_SECONDS, SUSTAINED, Demand, beyond_cache, seconds
from autoconv.layer import ConvLayer

GPU = DatasheetGPU(
    capability=90, model="small", multiprocessors=10, l2_bytes=1 << 20, clock_hz=1e9, memory_bandwidth=1e12
)
PRODUCTS = Demand(20, 256, 2, 0, slots=1000.0, products=1e6, delay=100.0)
H200, A100, RTX = GPUS
CLASSIC = ConvLayer(N=32, C=256, H=14, W=14, K=256, R=3, S=3, padding=1)
LAYERS = (
    CLASSIC,
    CLASSIC.replace(layout="NHWC", dtype="float16"),
    CLASSIC.replace(direction="wgrad"),
    ConvLayer(N=32, C=96, H=56, W=56, K=96, R=3, S=3, padding=1, groups=96),
    ConvLayer(N=1, C=64, H=56, W=56, K=256, R=1, S=1),
)


def ours(device: DatasheetGPU) -> list[Any]:
    return [one for one in registry.algorithms(device) if one.vendor is None]


def clocks(demand: Demand) -> float:
    return (seconds(GPU, [demand]) - LAUNCH_SECONDS) * SUSTAINED * GPU.clock_hz


def test_a_block_too_many_takes_another_round() -> None:
    """Two blocks to each of ten multiprocessors at a time; a last one has a multiprocessor for itself."""
    rate = 128
    assert clocks(PRODUCTS) == pytest.approx(2 * 1e6 / rate + 100)
    assert clocks(replace(PRODUCTS, blocks=40)) == pytest.approx(2 * 2 * 1e6 / rate + 100)
    assert clocks(replace(PRODUCTS, blocks=21)) == pytest.approx(2 * 1e6 / rate + (1e6 / rate + 100) + 100)
    assert clocks(replace(PRODUCTS, blocks=1)) == clocks(replace(PRODUCTS, blocks=10))


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({"slots": 1e6}, 2 * 1e6 / 4),
        ({"slots": 1e6, "threads": 32}, 2 * 1e6 / 2),  # two warps keep two of four schedulers busy
        ({"products": 1e8}, 2 * 1e8 / 128),
        ({"products": 1e8, "pipe": "wgmma"}, 2 * 1e8 / 2048),
        ({"products": 1e8, "pipe": "mma.tf32"}, 2 * 1e8 / (1024 * 0.63)),
        ({"shared": 1e6}, 2 * 1e6 / 128),
        ({"cached": 1e6}, 2 * 1e6 / 64),
        ({"slots": 1e6, "allocated": 128 << 10}, 2 * (1e6 / 4 + 100)),  # one block at a time has the shared memory
        ({"delay": 1e6}, 1e6 + 1000 / 4),
        ({"waiting": 1e6}, 1e6 + 100),  # blocks of a multiprocessor wait at the same time
    ],
    ids=str,
)
def test_what_is_asked_for_most_decides(asked: dict[str, Any], limit: float) -> None:
    demand = replace(PRODUCTS, **({"products": 0.0} | asked))
    assert clocks(demand) == pytest.approx(limit + demand.delay, rel=0.01)


@pytest.mark.parametrize(("width", "least", "most"), [(16, 1, 1), (14, 2, 5), (13, 4, 20)])
def test_a_librarys_product_in_float16_wants_aligned_rows(width: int, least: float, most: float) -> None:
    """Images of 256, 196 and 169 pixels in NCHW: rows that begin at multiples of 16, of 8 and of 2 bytes."""
    layer = ConvLayer(N=32, C=512, H=width, W=width, K=2048, R=1, S=1, dtype="float16")
    nhwc = layer.replace(layout="NHWC")
    explicit = next(one for one in ours(H200) if one.name == "gemm.explicit")
    images = {"IMAGES": 32, "MERGED": 0}
    ratio = explicit.estimate(layer, H200, images) / explicit.estimate(nhwc, H200, images | {"MERGED": 1})
    assert least * 0.8 < ratio < most * 1.2
    wide = layer.replace(dtype="float32")
    assert explicit.estimate(wide, H200, images) < 1.5 * explicit.estimate(
        wide.replace(layout="NHWC"), H200, images | {"MERGED": 1}
    )


def test_memory_and_launches_take_their_time() -> None:
    once, computing = seconds(GPU, [replace(PRODUCTS, memory=1e9)]), seconds(GPU, [PRODUCTS]) - LAUNCH_SECONDS
    assert once == pytest.approx(math.hypot(1e9 / (COPIED * 1e12), computing) + LAUNCH_SECONDS)
    assert seconds(GPU, [replace(PRODUCTS, memory=1e9)] * 3) == pytest.approx(3 * once)
    assert (beyond_cache(GPU, 1 << 19), beyond_cache(GPU, 1 << 20)) == (0.0, 2 << 20)


@pytest.mark.parametrize("layer", LAYERS, ids=ConvLayer.key)
@pytest.mark.parametrize("gpu", GPUS, ids=[gpu.model for gpu in GPUS])
def test_no_candidate_is_predicted_beyond_what_the_gpu_can_do(gpu: DatasheetGPU, layer: ConvLayer) -> None:
    found = predictions(layer, gpu, ours(gpu))
    assert all(math.isfinite(time) for time, _ in found)
    for time, candidate in found:
        assert time >= layer.bytes / gpu.bandwidth(), candidate
        if candidate.algorithm in ("gemm", "direct", "direct.tiled") and layer.groups == 1:
            assert time >= layer.flops / gpu.peak_flops("float32"), candidate
        if candidate.algorithm in ("gemm.tensor", "gemm.hopper"):
            assert time >= layer.flops / gpu.peak_flops("float16"), candidate


@pytest.mark.parametrize("layer", LAYERS[:2], ids=ConvLayer.key)
def test_a_gpu_twice_as_fast_takes_half_as_long_but_for_its_launches(layer: ConvLayer) -> None:
    fast = replace(A100, clock_hz=2 * A100.clock_hz, memory_bandwidth=2 * A100.memory_bandwidth)
    times = {str(candidate): time for time, candidate in predictions(layer, fast, ours(fast))}
    compared = 0
    for time, candidate in predictions(layer, A100, ours(A100)):
        if candidate.algorithm in ("gemm", "gemm.tensor") and candidate.params["SPLIT"] == 1:
            expected = (time - LAUNCH_SECONDS) / 2 + LAUNCH_SECONDS
            assert times[str(candidate)] == pytest.approx(expected)
            compared += 1
    assert compared


def names(found: Iterable[tuple[float, Candidate]]) -> list[str]:
    return list(dict.fromkeys(candidate.algorithm for _, candidate in found))


def test_first_choices_are_those_that_the_hardware_is_made_for() -> None:
    assert names(predictions(LAYERS[1], H200, ours(H200)))[:2] == ["gemm.hopper", "gemm.tensor"]
    assert names(predictions(LAYERS[1], A100, ours(A100)))[0] == "gemm.tensor"
    assert names(predictions(LAYERS[3], A100, ours(A100)))[0] == "depthwise"
    for gpu in GPUS:
        float32 = names(predictions(CLASSIC, gpu, ours(gpu)))
        assert float32[0].startswith("winograd")
        assert float32[-1] == "direct"
    # three products of tensor cores are ahead of scalar ones but where these are as wide as the tensor cores are narrow
    for gpu, ahead in ((H200, True), (A100, True), (RTX, False)):
        ranked = names(predictions(CLASSIC, gpu, ours(gpu)))
        assert (ranked.index("gemm.tensor.tf32x3.staged") < ranked.index("gemm")) == ahead


def test_the_page_is_what_the_model_says() -> None:
    """Of the shortest target; `python docs/predictions.py` writes all of it."""
    path = Path(__file__).parents[2] / "docs" / "predictions.py"
    spec = importlib.util.spec_from_file_location("predictions", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (target,) = (one for one in targets() if one.name == "unusual, float32")
    written = script.section(target, {layer: script.best(layer) for layer in target.layers})
    assert written in script.PAGE.read_text(encoding="utf-8"), "mend the page: python docs/predictions.py"


def test_a_report_puts_estimates_beside_what_was_timed() -> None:
    machine = {"item": "machine", "name": "a GPU", "versions": {}, "autoconv": "0", "commit": "0"}
    machine |= {"baselines": {}, "vendors": {}, "missing": {}}
    tuned = {"item": f"tune/hybrid/{CLASSIC.key()}", "predicted": {"a": 1e-3, "b": 2e-3, "c": 9.0}}
    tuned["timings"] = {"a": 2e-3, "b": 1.6e-3, "theirs": 1e-3}  # "c" failed
    text = markdown([machine, tuned], [], 0)
    expected = (
        "- estimates of 2 candidates of 1 layers: median error 38 %; the first choice takes 1.25 of the least time"
    )
    assert expected in text
