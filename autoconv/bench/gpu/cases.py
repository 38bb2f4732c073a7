"""The cases of our kernels: layers and parameters that the tests' emulator runs, for the same checks on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoconv.algorithm import Algorithm, Params
from autoconv.bench.gpu.edges import EDGES, EPILOGUES, edge
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.cuda.device import CUDA
from autoconv.cuda.gemm.tensor import TILES as TENSOR_TILES
from autoconv.cuda.gemm.tensor import TensorTile
from autoconv.cuda.hopper.hopper import TILES, HopperTile
from autoconv.cuda.hopper.split import TILES as PARTS_TILES
from autoconv.cuda.stem.tensor_wgrad import TILES as WGRAD_TILES
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer

SCHEDULES = 16  # of the emulator
CAPABILITY = 90  # times ten, of the GPU whose candidates the cases are: it has all instructions
FULL_EPILOGUE: dict[str, Any] = {"bias": True, "residual": True, "activation": "relu"}
SLOPES: dict[str, Any] = {"bias": True, "activation": "prelu"}

# Of wgrad, a tile and a half: the rest would be of a tap farther than the copy engine reaches.
FAR_TAPS: dict[str, Any] = {"N": 1, "H": 10, "W": 2, "S": 1, "dilation": (100, 1), "padding": (100, 0)}

Case = tuple[ConvLayer, Params, int]  # the last is the schedule, which only the emulator has
Planned = tuple[dict[str, Any], dict[str, int]]


def _hopper(tile: HopperTile, SPLIT: int, dtype: str, direction: int = 0, **fields: Any) -> Planned:
    """A layer whose channels are no whole lines or tiles, in parts that nobody would choose for so small a one."""
    problem = {"N": 2, "C": 136, "H": 9, "W": 8, "K": 136, "R": 3, "S": 3, "padding": 1, "layout": "NHWC"}
    params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": SPLIT}
    return problem | {"dtype": dtype, "direction": DIRECTIONS[direction]} | fields, params


def _pixels(tile: HopperTile, SPLIT: int, dtype: str, direction: int = 0, **fields: Any) -> Planned:
    """A layer of one tap in NCHW, whose channels and pixels are no whole lines."""
    problem = {"N": 3, "C": 104, "H": 9, "W": 8, "K": 136, "R": 1, "S": 1, "dtype": dtype}
    params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": SPLIT}
    return problem | {"direction": DIRECTIONS[direction]} | fields, params


def _staged(
    tile: HopperTile | TensorTile, direction: str, layout: str, dtype: str, SPLIT: int = 1, **fields: Any
) -> Planned:
    """A layer whose arrays have to be copied first."""
    params = {"BM": tile.BM, "BN": tile.BN} | ({"STAGES": tile.STAGES} if isinstance(tile, HopperTile) else {})
    problem = {"N": 2, "H": 9, "W": 8, "R": 3, "S": 3, "padding": 1, "direction": direction, "layout": layout}
    return problem | {"dtype": dtype} | fields, params | {"SPLIT": SPLIT}


def _divided(params: dict[str, int], direction: str, depth: int, **fields: Any) -> Planned:
    """Five whole slices of the depth in four parts: the third has one less, the last none, and nothing more is zero."""
    channels = {"fwd": {"C": 5 * depth, "K": 8}, "dgrad": {"C": 8, "K": 5 * depth}}[direction]
    problem = {"N": 1, "H": 3, "W": 3, "R": 1, "S": 1, "layout": "NHWC", "direction": direction}
    return problem | channels | fields, params | {"SPLIT": 4}


def _points(m: int, layout: str, direction: str = "fwd", **fields: Any) -> Planned:
    """Channels beyond one block of the transforms, and no whole number of tiles to one."""
    problem = {"N": 1, "C": 37, "H": 9, "W": 8, "K": 35, "R": 3, "S": 3, "padding": 1}
    return problem | {"layout": layout, "direction": direction} | fields, {"m": m, "BM": 64, "BN": 64}


def _gradients(m: int, layout: str, SPLIT: int, **fields: Any) -> Planned:
    """The same for the gradient of filters, the sum over tiles in parts."""
    fields, params = _points(m, layout, **fields)
    return fields, params | {"SPLIT": SPLIT}


def _tiled(tile: int, direction: str, layout: str, dtype: str, **fields: Any) -> Planned:
    """Four tiles or more to an image."""
    problem = {"N": 2, "C": 4, "H": 35, "W": 37, "K": 6, "R": 3, "S": 3, "padding": ((1, 2), (2, 0)), "groups": 2}
    return problem | {"direction": direction, "layout": layout, "dtype": dtype} | fields, {"tile": tile, "IMAGES": 1}


def _blocks(params: dict[str, Any], **fields: Any) -> Planned:
    """Several blocks, full in no direction, where one block holds any edge."""
    return {"N": 14, "C": 3, "H": 5, "W": 8, "K": 40, "R": 3, "S": 3, "padding": 1} | fields, params


def _few_channels(tile: int, TP: int, TQ: int, SPLIT: int, **fields: Any) -> Planned:
    """The gradient of the filters of a first layer: several tiles of pixels."""
    problem = {"N": 2, "C": 3, "H": 21, "W": 20, "K": 37, "R": 3, "S": 3, "padding": 1, "direction": "wgrad"}
    one = WGRAD_TILES[tile]
    return problem | fields, {"BM": one.BM, "BN": one.BN, "WM": one.WM, "TP": TP, "TQ": TQ, "SPLIT": SPLIT}


def _tile(BM: int, TQ: int, TK: int, BK: int, **more: str) -> dict[str, Any]:
    return {"BM": BM, "TQ": TQ, "TK": TK, "BK": BK, **more}


SCALAR_TILE = {"BM": 32, "BN": 64, "BK": 16, "TM": 4, "TN": 4}

# Layers and parameters that a family's kernels must meet and the edges do not lead to.
PLANNED: dict[str, tuple[Planned, ...]] = {
    "gemm": (
        # single floats of which many are outside of the image, or beyond the depth
        _blocks(SCALAR_TILE | {"SPLIT": 1}, **FULL_EPILOGUE),
        _divided(SCALAR_TILE, "fwd", 16, **SLOPES),
        # depths that are summed in two stretches, of one part and of each of two
        _blocks(SCALAR_TILE | {"SPLIT": 1}, N=3, C=2, H=24, W=24, K=3, R=1, S=1, padding=0, direction="wgrad"),
        _blocks(SCALAR_TILE | {"SPLIT": 2}, N=1, C=260, H=3, K=5, layout="NHWC", **FULL_EPILOGUE),
        # two tiles of eleven parts, which are summed in groups of four, the last of three
        _blocks(SCALAR_TILE | {"SPLIT": 11}, N=1, C=176, H=3, W=3, K=35, R=1, S=1, padding=0, **FULL_EPILOGUE),
        # taps that do not follow each other; and a row of them too long for a table, of the only channel
        _blocks(SCALAR_TILE | {"SPLIT": 1}, N=1, K=3, padding=2, dilation=2),
        _blocks(SCALAR_TILE | {"SPLIT": 1}, N=1, C=1, H=1, K=3, R=1, S=31, padding=(0, 15), direction="wgrad"),
    ),
    "gemm.tensor": (
        _divided({"BM": 64, "BN": 64}, "dgrad", 32, dtype="float16"),
        # two rows of nine tiles, in two strips
        ({"N": 1, "C": 8, "H": 9, "W": 8, "K": 520, "R": 1, "S": 1, "layout": "NHWC", "dtype": "float16"},
         {"BM": 64, "BN": 64, "SPLIT": 1}),
    ),
    "gemm.hopper": (
        *(_hopper(tile, 2 + i % 2, "float16", i % 3) for i, tile in enumerate(TILES)),
        _hopper(TILES[-1], 1, "float16", K=67, **FULL_EPILOGUE),
        _hopper(TILES[-1], 3, "bfloat16", K=67, **FULL_EPILOGUE),
        _hopper(TILES[5], 2, "bfloat16", C=128, groups=2, **SLOPES),
        _hopper(TILES[-1], 2, "bfloat16", 1, C=48, K=128, groups=2, stride=2),
        _hopper(TILES[3], 1, "float16", 1, R=1, S=2, stride=2, padding=((0, 1), (2, 0))),  # passes without taps
        _hopper(TILES[6], 3, "float16", 2, C=72, K=48, groups=3, stride=(1, 2)),
        _hopper(TILES[1], 1, "bfloat16", N=4, dilation=(1, 2), padding=((1, 0), (3, 2))),
        _hopper(TILES[-2], 1, "bfloat16", 2, C=40, K=40, **FAR_TAPS),
    ),
    "gemm.hopper.tf32": (
        *(_hopper(tile, 2 + i % 2, "float32", C=40) for i, tile in enumerate(TILES)),
        _hopper(TILES[-1], 1, "float32", C=40, K=67, **FULL_EPILOGUE),
        _hopper(TILES[-1], 3, "float32", C=40, K=67, **FULL_EPILOGUE),
        _hopper(TILES[0], 1, "float32", C=64, groups=2, stride=(2, 1), dilation=(1, 2), padding=((1, 0), (3, 2))),
        _hopper(TILES[-1], 2, "float32", 1, C=36, K=68),
        _hopper(TILES[-2], 1, "float32", 1, C=24, K=64, groups=2, stride=2),
    ),
    "gemm.hopper.bf16x6": (
        *(_hopper(tile, 1 + i % 2, "float32", i % 3, C=100, K=132) for i, tile in enumerate(PARTS_TILES)),
        _hopper(PARTS_TILES[-1], 1, "float32", C=36, K=67, **FULL_EPILOGUE),
        _hopper(PARTS_TILES[-2], 3, "float32", C=64, K=72, groups=2, **SLOPES),
        _hopper(PARTS_TILES[-1], 2, "float32", 1, C=24, K=64, groups=2, stride=2),
        _hopper(PARTS_TILES[3], 1, "float32", 1, C=36, K=68, R=1, S=2, stride=2, padding=((0, 1), (2, 0))),  # no taps
        _hopper(PARTS_TILES[-1], 3, "float32", 2, C=24, K=24, groups=3, stride=(1, 2), dilation=(2, 1)),
        _hopper(PARTS_TILES[-2], 1, "float32", 2, C=40, K=36, **FAR_TAPS),
        _hopper(PARTS_TILES[-1], 1, "float32", 2, C=37, K=36),
    ),
    "gemm.hopper.bf16x6.pointwise": (  # pixels of an image in whole runs, in part of one, and hardly any
        *(_pixels(tile, 1 + i % 2, "float32", i % 2) for i, tile in enumerate(PARTS_TILES)),
        _pixels(PARTS_TILES[-1], 1, "float32", H=6, W=6, K=67, **FULL_EPILOGUE),
        _pixels(PARTS_TILES[-2], 3, "float32", C=132, H=8, W=16, K=72, **SLOPES),
        _pixels(PARTS_TILES[3], 2, "float32", 1, N=5, C=67, H=2, W=2),
        _pixels(PARTS_TILES[1], 1, "float32", N=1, C=5, H=14, W=14, K=129, **FULL_EPILOGUE),
    ),
    "gemm.hopper.pointwise": (
        *(_pixels(tile, 1 + i % 2, "float16", i % 2) for i, tile in enumerate(TILES)),
        _pixels(TILES[-1], 1, "bfloat16", H=6, W=12, K=67, **FULL_EPILOGUE),
        _pixels(TILES[-2], 3, "float16", C=200, H=8, W=16, K=72, **SLOPES),
        _pixels(TILES[3], 2, "bfloat16", 1, N=5, C=72, H=2, W=4),
    ),
    **{name: tuple(  # every tile, each way, in parts that nobody would choose for so small a layer
        ({"N": 2, "C": 36, "H": 9, "W": 8, "K": 68, "R": 3, "S": 3, "padding": 1, "layout": "NHWC",
          "direction": DIRECTIONS[(i + turn) % 3]} | (FULL_EPILOGUE if (i + turn) % 3 == 0 else {}),
         {"BM": tile.BM, "BN": tile.BN, "SPLIT": 1 + i % 2})
        for i, tile in enumerate(TENSOR_TILES)
    ) for turn, name in enumerate(("gemm.tensor.tf32x3", "gemm.tensor.bf16x6"))},
    "gemm.tensor.staged": (  # channels beyond one square, and such as are no whole runs, each way and in either layout
        _staged(TENSOR_TILES[3], "fwd", "NCHW", "float16", C=43, K=37, **FULL_EPILOGUE),
        _staged(TENSOR_TILES[4], "dgrad", "NHWC", "bfloat16", C=13, K=21),
        _staged(TENSOR_TILES[3], "wgrad", "NCHW", "float16", C=11, K=35, SPLIT=2),
    ),
    **{name: (
        _staged(TENSOR_TILES[4], "fwd", "NCHW", "float32", C=3, K=5, stride=2, **FULL_EPILOGUE),
        _staged(TENSOR_TILES[3], "dgrad", "NCHW", "float32", C=5, K=38),
        _staged(TENSOR_TILES[3], "wgrad", "NHWC", "float32", C=7, K=9, SPLIT=2),
    ) for name in ("gemm.tensor.tf32x3.staged", "gemm.tensor.bf16x6.staged")},
    "gemm.hopper.staged": (
        _staged(TILES[-1], "fwd", "NCHW", "bfloat16", C=3, K=37, **FULL_EPILOGUE),
        _staged(TILES[-1], "dgrad", "NCHW", "float16", C=13, K=21),
        _staged(TILES[-1], "wgrad", "NHWC", "float16", C=43, K=11, SPLIT=2),
    ),
    "gemm.hopper.bf16x6.staged": (
        _staged(PARTS_TILES[-1], "fwd", "NCHW", "float32", C=3, K=37, **FULL_EPILOGUE),
        _staged(PARTS_TILES[-1], "dgrad", "NCHW", "float32", C=36, K=64, R=1, S=1, padding=0),  # filters as they are
        _staged(PARTS_TILES[-1], "wgrad", "NHWC", "float32", C=7, K=9, SPLIT=2),
    ),
    "direct.tiled": (
        _blocks(_tile(32, 7, 8, 4), **SLOPES),
        _blocks(_tile(32, 5, 8, 4, INPUT="texture"), residual=True),
        _blocks(_tile(16, 5, 8, 2), C=7, H=11, W=16, layout="NHWC", dtype="float16"),
        _blocks(_tile(8, 5, 8, 2, INPUT="texture"), C=7, H=11, W=16, layout="NHWC", dtype="bfloat16"),
        _blocks(_tile(64, 5, 16, 4), N=3, C=40, H=29, W=23, K=5, direction="dgrad"),
    ),
    **{name: (  # several tiles to a block, rows that begin off sixteen bytes, two blocks of filters, quads beyond taps
        _blocks({"BM": 64, "BQ": 16, "WARPS": 4}, N=2, H=17, W=40, K=70, dtype=dtype, **FULL_EPILOGUE),
        _blocks({"BM": 64, "BQ": 32, "WARPS": 4}, N=2, C=5, H=11, W=48, dtype=dtype, layout="NHWC", **SLOPES),
        _blocks({"BM": 32, "BQ": 16, "WARPS": 4}, N=3, C=1, H=9, W=33, K=33, dtype=dtype, stride=(2, 1), residual=True),
        _blocks({"BM": 32, "BQ": 32, "WARPS": 4}, N=1, H=12, W=37, K=36, R=5, dtype=dtype, dilation=2, stride=(1, 3)),
        _blocks({"BM": 64, "BQ": 16, "WARPS": 8}, N=1, C=8, H=18, W=19, K=12, dtype=dtype, layout="NHWC"),
        _blocks({"BM": 32, "BQ": 16, "WARPS": 8}, N=2, C=4, H=38, W=24, R=7, S=7, padding=3, dtype=dtype, stride=2),
    ) for name, dtype in (("direct.tensor", "float16"), ("direct.tensor.bf16x6", "float32"))},
    "direct.chwn": (
        _blocks({"BM": 128, "BN": 128, "BK": 8}, N=133, H=4, W=3, K=5, **FULL_EPILOGUE),
        _blocks({"BM": 32, "BN": 32, "BK": 16}, N=37, C=20, H=7, W=6, K=6, stride=2, layout="NHWC", direction="dgrad"),
    ),
    "direct.tensor.bf16x6.wgrad": (  # every tile; rows of pixels in runs of four, two and one, and in part of a slice
        _few_channels(0, 8, 32, 2, K=70),
        _few_channels(0, 16, 16, 11, N=11, C=1, W=32),
        _few_channels(1, 4, 32, 4, N=1, C=1, W=16, H=17, K=64),  # five tiles in four parts, the last of none
        _few_channels(2, 8, 48, 3, C=4, W=41, padding=2, dilation=(2, 1)),
        _few_channels(3, 4, 32, 2, W=46, R=5, S=5, padding=(2, 1)),
        _few_channels(3, 4, 16, 1, R=5, S=5, stride=(1, 2), dilation=(1, 3), padding=((3, 0), (4, 5))),
        _few_channels(4, 4, 16, 3, W=24, R=7, S=7, stride=2, padding=3, K=64),
        _few_channels(5, 2, 32, 1, H=23, W=35, R=7, S=7, stride=(2, 1), padding=3),
        _few_channels(6, 1, 16, 2, N=1, H=35, W=47, R=11, S=11, stride=4, padding=2),  # words of a patch in rounds
        _few_channels(7, 2, 16, 3, C=2, H=35, W=47, K=100, R=11, S=11, stride=4),
    ),
    "depthwise": tuple(  # a window of inputs too wide for registers
        ({"N": 2, "C": 3, "H": 4, "W": 75, "K": 6, "R": 2, "S": 23, "groups": 3, "dilation": (1, 3), "layout": layout,
          "padding": ((1, 0), (33, 31))}, {"TQ": TQ})
        for layout, TQ in (("NCHW", 4), ("NHWC", 2))
    ),
    "depthwise.wgrad": tuple(  # in parts, the last shorter, over filters that fill no block
        ({"N": 3, "C": C, "H": 12, "W": 11, "K": K, "R": 3, "S": S, "groups": C, "padding": 1, "layout": layout,
          "dtype": dtype, "direction": "wgrad"} | fields, {"SPLIT": SPLIT})
        for layout, dtype, C, K, S, SPLIT, fields in (
            ("NCHW", "float32", 5, 5, 3, 2, {"N": 5, "stride": (1, 2)}),
            ("NHWC", "float16", 37, 37, 3, 5, {"dilation": (2, 1)}),
            ("NHWC", "float64", 20, 40, 4, 3, {}),
        )
    ),
    "winograd": tuple(  # few tiles of many channels: what is read too far lies in no other matrix
        ({"N": 1, "C": C, "H": 2, "W": 2, "K": K, "R": 3, "S": 3, "padding": 1, "layout": "NHWC", "direction": d},
         {"m": 2, "BM": 64, "BN": 64})
        for d, C, K in (("fwd", 64, 1), ("dgrad", 1, 64))
    ),
    **{name: tuple(
        (fields, params | stages)
        for fields, params in (
            _points(2, "NCHW", **FULL_EPILOGUE),
            _points(4, "NHWC", R=5, S=2, padding=((1, 3), (0, 1)), **SLOPES),
            _points(6, "NCHW", "dgrad", C=35, K=37),
            _points(4, "NHWC", "dgrad", C=12, K=70, groups=2),
            _points(2, "NCHW", C=76, K=18, H=3, groups=2, R=1, padding=0),
        )
    ) for name, stages in (("winograd.tensor.tf32x3", {}), ("winograd.hopper.bf16x6", {"STAGES": 3}))},
    **{name: tuple(
        (fields | {"direction": "wgrad"}, params | stages)
        for fields, params in (
            _gradients(2, "NCHW", 1),
            _gradients(4, "NHWC", 2, R=5, S=2, padding=((1, 3), (0, 1))),
            _gradients(6, "NCHW", 1, C=35, K=37),
            _gradients(4, "NHWC", 1, C=12, K=70, groups=2),
            _gradients(4, "NCHW", 1, N=3, H=12),
            _gradients(2, "NCHW", 1, C=76, K=18, H=3, groups=2, R=1, padding=0),
        )
    ) for name, stages in (("winograd.tensor.tf32x3.wgrad", {}), ("winograd.hopper.bf16x6.wgrad", {"STAGES": 3}))},
    "gemm.explicit": (  # sums wider than the output, of which there are no whole blocks
        ({"N": 2, "C": 3, "H": 5, "W": 7, "K": 5, "R": 3, "S": 2, "dtype": "float16", "direction": "wgrad"},
         {"IMAGES": 1, "MERGED": 1}),
    ),
    "fft": (
        ({"N": 1, "C": 3, "H": 9, "W": 11, "K": 5, "R": 3, "S": 3}, {"tile": 0, "IMAGES": 1}),  # no whole blocks
        _tiled(16, "fwd", "NHWC", "float32", stride=2, dilation=2, **FULL_EPILOGUE),
        _tiled(32, "fwd", "NCHW", "float64", H=70, R=5, stride=(3, 1), dilation=(2, 3), **SLOPES),
        _tiled(16, "dgrad", "NCHW", "float16", stride=(2, 1), dilation=(1, 2)),
        _tiled(32, "dgrad", "NHWC", "float32", W=80, S=7, stride=2, dilation=(3, 2)),
        _tiled(16, "wgrad", "NHWC", "bfloat16", stride=(1, 3), dilation=2),
        _tiled(32, "wgrad", "NCHW", "float32", H=75, R=5, stride=2, dilation=(2, 3)),
        _tiled(16, "fwd", "NCHW", "float32", C=5, K=10, groups=5, R=9, S=8, dilation=1),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class NominalGPU(CUDA):
    """A small GPU of some compute capability, of which there are only the facts that candidates depend on."""

    capability: int = CAPABILITY

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "name": f"nominal sm_{self.capability}",
            "compute_capability": self.capability,
            "multiprocessors": 4,
            "l2_bytes": 1 << 20,
            "memory_bytes": 1 << 30,
            "clock_hz": 1e9,
            "bandwidth": 1e11,
        }


NOMINAL = NominalGPU()


def runnable(algorithm: Algorithm[Any], layer: ConvLayer, device: NominalGPU = NOMINAL) -> list[Params]:
    """The parameters of the nominal GPU's candidates that can run, as far as no library is asked."""
    assert isinstance(algorithm, CudaAlgorithm)
    return [
        params
        for params in ([] if algorithm.unsupported(layer) else algorithm.candidates(layer, device))
        if not (algorithm.unfit(layer, params) or algorithm.incapable(layer, params, device.capability))
    ]


def variants(name: str, **choices: Any) -> Iterator[ConvLayer]:
    """The edge, and what is nearest to it that kernels with narrower tastes can take."""
    groups = EDGES[name].get("groups", 1)
    wide = {"C": 8 * groups, "K": 16 * groups, "layout": "NHWC"}
    yield edge(name, **choices)
    yield edge(name, **(choices | {"dtype": "float32"}))
    yield edge(name, **(choices | wide))
    yield edge(name, **(choices | wide | {"dtype": "float16", "N": 3}))
    yield edge(name, **(choices | wide | {"dtype": "float32"}))
    yield edge(name, **(choices | {"layout": "NCHW", "dtype": "float16"}))


def planned(algorithm: Algorithm[Any]) -> Iterator[Case]:
    """What is planned for an algorithm, with a schedule to each."""
    for turn, (fields, params) in enumerate(PLANNED.get(algorithm.name, ())):
        yield ConvLayer(**fields), params, (5 * turn + 2) % SCHEDULES


@functools.cache
def cases(algorithm: Algorithm[Any]) -> list[Case]:
    """All of an algorithm's cases."""
    return [*planned(algorithm), *edge_cases(algorithm)]


def edge_cases(algorithm: Algorithm[Any]) -> Iterator[Case]:
    """Each edge in every direction, the other choices taken in turn so that pairs of them meet."""
    turn = 0
    for (i, name), (j, direction) in itertools.product(enumerate(EDGES), enumerate(DIRECTIONS)):
        epilogue = list(EPILOGUES.values())[i % 4] if direction == "fwd" else {}
        choices = {"dtype": list(DTYPES)[(i + 2 * j) % 4], "layout": LAYOUTS[(i // 4 + j) % 2]}
        for layer in variants(name, direction=direction, **choices, **epilogue):
            if params := runnable(algorithm, layer):
                yield layer, params[turn % len(params)], turn % SCHEDULES
                turn += 1
                break
