"""What blocks of tiles fetch while they multiply: as much as comes next, and in kernels as many lines as stated."""

from __future__ import annotations

import math

import pytest

from autoconv.cpu.codegen.ir import LINE
from autoconv.cpu.codegen.tiles import TILE_ROWS
from autoconv.cpu.common.correlation import flat_correlations
from autoconv.cpu.common.tiles.products import FILTERS
from autoconv.cpu.matrix import kernels, pointwise_kernels
from autoconv.cpu.matrix.geometry import MatrixBlocking, Panel, blocking
from autoconv.cpu.matrix.pointwise_kernels import PointwisePanel
from autoconv.layer import ConvLayer

LAYER = ConvLayer(N=1, C=128, H=14, W=14, K=96, R=3, S=3, padding=1)


def cut(layer: ConvLayer, products: int) -> tuple[Panel, MatrixBlocking]:
    (c,) = flat_correlations(layer)
    b = blocking(c, products, 1024, layer.C, 2)
    return (Panel if layer.R > 1 else PointwisePanel)(c, b), b


def test_it_is_all_that_comes_next_and_hardly_more() -> None:
    panel, _ = cut(LAYER, 6)
    fetch, pairs = kernels.Fetch.of(LAYER, panel), -(-panel.tiles // 2)
    assert fetch.steps == 9 * 4
    read = 3 * 2 * TILE_ROWS  # lines of a step: three parts of two tiles
    assert read <= fetch.filters * pairs < read + pairs
    of_filter = 14 * 14 * 4 / LINE
    assert of_filter <= fetch.outputs * pairs < of_filter + pairs
    assert fetch.apart == 14 * 14 * 4
    few, last = LAYER.replace(K=32), LAYER.replace(layout="NHWC")  # no filters come next; outputs lie apart
    for other, filters, outputs in ((few, 0, fetch.outputs), (last, fetch.filters, 0)):
        found = kernels.Fetch.of(other, cut(other, 6)[0])
        assert (found.filters, found.outputs) == (filters, outputs)


@pytest.mark.parametrize("products", [3, 6])
@pytest.mark.parametrize("layer", [LAYER, LAYER.replace(R=1, S=1, padding=0)], ids=["3x3", "1x1"])
def test_each_step_of_the_kernel_fetches_its_part(layer: ConvLayer, products: int) -> None:
    """Once, though six products of few channels pass over the taps twice."""
    panel, b = cut(layer, products)
    fetch = kernels.Fetch.of(layer, panel)
    emit = kernels.emit if layer.R > 1 else pointwise_kernels.emit
    blocks = [f for f in emit("avx2", "emulated", layer, (b,)).functions if f.name.startswith("block_2x2")]
    lines = fetch.filters + math.ceil(FILTERS / fetch.steps) * fetch.outputs
    assert lines > 0
    assert [str(f).count("@llvm.prefetch") for f in blocks] == [lines]
