"""Whether products of few tiles are divided into parts enough to give every multiprocessor some work."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from simt.emulator import Emulated

from autoconv import networks
from autoconv.algorithm import Algorithm
from autoconv.cuda.depthwise.wgrad import DepthwiseWgrad
from autoconv.cuda.gemm.gemm import Gemm
from autoconv.cuda.gemm.tensor import Tensor
from autoconv.cuda.hopper.hopper import Hopper
from autoconv.layer import ConvLayer

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))
MULTIPROCESSORS = 132


class H200(Emulated):
    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | {"multiprocessors": MULTIPROCESSORS}


DEVICE = H200(capability=90)


@cache
def layers(batch: int, direction: str) -> tuple[ConvLayer, ...]:
    """Those of all networks, each once."""
    found = (named.at(batch, direction) for config in CONFIGS for named in networks.load(config).layers)
    return tuple(dict.fromkeys(layer.replace(bias=False, residual=False, activation=None) for layer in found))


def idle(algorithm: Algorithm[Any], batch: int, direction: str, **fields: Any) -> dict[str, tuple[int, int]]:
    """Layers of which no candidate gives nine tenths of the multiprocessors a block: the most, in how many parts."""
    found = {}
    for layer in layers(batch, direction):
        asked = layer.replace(**fields)
        blocks = [
            (math.prod(algorithm.units(asked, one.params)[0].grid), int(one.params.get("SPLIT", 1)))
            for one in algorithm.all(asked, DEVICE)
        ]
        if blocks and max(blocks)[0] < 0.9 * MULTIPROCESSORS:
            found[asked.key()] = max(blocks)
    return found


HALVES = {"dtype": "float16", "layout": "NHWC"}


@pytest.mark.parametrize(("batch", "direction"), [(1, "fwd"), (1, "dgrad"), (1, "wgrad"), (32, "wgrad")])
@pytest.mark.parametrize(
    ("algorithm", "fields", "depth"),
    [(Gemm(), {}, 128), (Tensor(), HALVES, 256), (Hopper(), HALVES, 512)],
    ids=["gemm", "gemm.tensor", "gemm.hopper"],
)
def test_products_of_few_tiles_are_divided_as_far_as_their_depth_allows(
    algorithm: Algorithm[Any], fields: dict[str, Any], depth: int, batch: int, direction: str
) -> None:
    """What is left idle has parts that are too short to be divided again: another launch, and sum, would cost more."""
    for key, (_, parts) in idle(algorithm, batch, direction, **fields).items():
        layer = ConvLayer.parse(key)
        components = max(layer.stride) > 1 and (algorithm.name, direction) == ("gemm.hopper", "dgrad")
        taps = 1 if components else layer.R * layer.S  # some component has a single tap, or more
        sums = {"fwd": layer.C * taps, "dgrad": layer.K * taps, "wgrad": batch * layer.P * layer.Q}[direction]
        assert sums / layer.groups ** (direction != "wgrad") / parts < depth, key


def test_the_first_layers_gradient_is_of_one_tile_and_fills_the_machine() -> None:
    layer = ConvLayer(N=32, C=3, H=224, W=224, K=64, R=3, S=3, padding=1, direction="wgrad")
    assert max(math.prod(Gemm().units(layer, one.params)[0].grid) for one in Gemm().all(layer, DEVICE)) >= 128


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("channels", "side"), [(32, 112), (96, 56), (576, 14)])
def test_few_taps_of_depthwise_filters_fill_the_machine(channels: int, side: int, layout: str) -> None:
    layer = ConvLayer(
        N=8, C=channels, H=side, W=side, K=channels, R=3, S=3, padding=1, groups=channels, layout=layout,
        direction="wgrad",
    )  # fmt: skip
    algorithm = DepthwiseWgrad()
    assert max(math.prod(algorithm.units(layer, one.params)[0].grid) for one in algorithm.all(layer, DEVICE)) >= 132
