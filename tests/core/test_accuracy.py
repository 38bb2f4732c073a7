"""The error of every family of kernels against float64, on layers of real size: the table of the documentation.

`PYTHONPATH=tests python tests/core/test_accuracy.py` writes it anew.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from guards import run_guarded

from autoconv import accuracy
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu import pool
from autoconv.cpu.common import sums
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer
from autoconv.registry import algorithms
from autoconv.tuning import reference

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "accuracy.md"
MARK = "<!-- accuracy: written by tests/core/test_accuracy.py -->"
WIDTHS = ("float32", "float16", "bfloat16")
DEVICE = CPU.current()
EMULATED = CPU(threads=2, instruction_set=DEVICE.instruction_set, matrix_unit="emulated")
LAYERS = {
    "3x3": ConvLayer(N=1, C=128, H=28, W=28, K=128, R=3, S=3, padding=1),
    "5x5": ConvLayer(N=1, C=96, H=27, W=27, K=128, R=5, S=5, padding=2),
    "1x7": ConvLayer(N=1, C=128, H=17, W=17, K=128, R=1, S=7, padding=(0, 3)),
    "15x15": ConvLayer(N=1, C=32, H=56, W=56, K=32, R=15, S=15, padding=7),
    "1x1": ConvLayer(N=1, C=256, H=28, W=28, K=128, R=1, S=1),
    "3x3, 512 channels": ConvLayer(N=1, C=512, H=14, W=14, K=64, R=3, S=3, padding=1),
    "1x1, 2048 channels": ConvLayer(N=1, C=2048, H=7, W=7, K=64, R=1, S=1),
    "depthwise 3x3": ConvLayer(N=1, C=128, H=56, W=56, K=128, R=3, S=3, padding=1, groups=128),
}
# family, layer, and outputs of a tile where that matters
ROWS = (
    *(("direct", name, "") for name in ("3x3", "5x5", "15x15", "3x3, 512 channels")),
    *((family, name, "") for family in ("gemm", "gemm.packed") for name in ("1x1", "1x1, 2048 channels")),
    *(("gemm.strassen", name, "") for name in ("1x1", "1x1, 2048 channels")),
    ("depthwise", "depthwise 3x3", ""),
    *(("winograd", "3x3", f"{m}x{m}") for m in (2, 3, 4, 5, 6, 7)),
    *(("winograd", "3x3, 512 channels", f"{m}x{m}") for m in (2, 4, 6)),
    *(("winograd", "5x5", f"{m}x{m}") for m in (2, 4, 5)),
    *(("winograd", "1x7", f"1x{m}") for m in (2, 3)),
    *(("fft", name, "") for name in ("5x5", "15x15")),
    *((family, name, "") for family in ("matrix", "matrix.x3") for name in ("3x3", "5x5", "1x1")),
    *(("winograd.matrix", "3x3", f"{m}x{m}") for m in (2, 4, 6)),
    *(("winograd.matrix.x3", "3x3", f"{m}x{m}") for m in (2, 3, 4)),
    *((family, "5x5", "") for family in ("fft.matrix", "fft.matrix.x3")),
    ("numpy.gemm", "3x3", ""),
)


def device_of(family: str) -> CPU:
    """This processor; for families of a matrix unit with an emulated one, whose values are the same."""
    return EMULATED if "matrix" in family else DEVICE


def parameters(algorithm: Algorithm, layer: ConvLayer, tile: str, long: bool = False) -> Mapping[str, int | str]:
    if tile:
        return {"m": tile, "rows": 1, "coop": 0}
    device = device_of(algorithm.name)
    able = (c.params for c in algorithm.all(layer, device) if not algorithm.why_not(layer, device, c.params))
    return (max if long else min)(able, key=lambda params: int(params.get("BC", 0)))  # channels at a time


def errors(family: str, layer: ConvLayer, tile: str, long: bool = False) -> tuple[float, float]:
    """The largest error and the root of the mean square, by the measure of `Algorithm.bound`; normal operands."""
    device = device_of(family)
    algorithm = next(a for a in algorithms(device) if a.name == family)
    params = parameters(algorithm, layer, tile, long)
    assert not algorithm.why_not(layer, device, params)
    x, w = drawn(layer)
    candidate = Candidate(family, tuple(params.items()))
    return measured(layer, x, w, run_guarded(algorithm, layer, device, candidate, (x, w, None, None), "after"))


def drawn(layer: ConvLayer) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32).astype(layer.numpy_dtype) for shape in layer.input_shapes)
    return x, w


def measured(layer: ConvLayer, x: np.ndarray, w: np.ndarray, out: np.ndarray) -> tuple[float, float]:
    want, magnitude = reference.convolve(layer, x, w), reference.magnitude(layer, x, w)
    rms = np.sqrt(np.mean((out.astype(np.float64) - want) ** 2)) / magnitude.max()
    return reference.error(out, want, magnitude), float(rms)


def widths(family: str) -> tuple[str, ...]:
    """The types that a family takes, of those in the table."""
    dtypes = next(a.dtypes for a in algorithms(DEVICE) if a.name == family)
    return tuple(dtype for dtype in WIDTHS if dtype in dtypes)


def label(family: str, tile: str, layer: ConvLayer) -> str:
    """A row's first cell, such as `winograd` F(4x4, 3x3)."""
    return f"`{family}`" + (f" F({tile}, {layer.R}x{layer.S})" if tile else "")


def table() -> Iterator[str]:
    yield f"| family | layer | {' | '.join(f'{dtype}: largest, RMS' for dtype in WIDTHS)} |"
    yield f"|---|---|{'---|' * len(WIDTHS)}"
    for family, name, tile in ROWS:
        found = (errors(family, LAYERS[name].replace(dtype=dtype), tile) for dtype in widths(family))
        cells = " | ".join(f"{largest:.1e}, {rms:.1e}" for largest, rms in found)
        cells += " | " * (len(WIDTHS) - len(widths(family)))
        yield f"| {label(family, tile, LAYERS[name])} | {name} | {cells} |"


@pytest.mark.stress
@pytest.mark.parametrize(("family", "name", "tile"), ROWS)
def test_the_table_of_the_documentation_is_true(family: str, name: str, tile: str) -> None:
    """Here as there, within the factor by which other vectors and tiles of registers may differ."""
    layer = LAYERS[name]
    start = f"| {label(family, tile, layer)} | {name} |"
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(start))
    for dtype, cell in zip(widths(family), row.split("|")[3:], strict=False):
        here = errors(family, layer.replace(dtype=dtype), tile)
        for value, committed in zip(here, map(float, cell.split(",")), strict=True):
            assert committed / 2 <= value <= 2 * committed


def one_by_one(layer: ConvLayer, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The products of each output added one after the other, every sum rounded to float32."""
    out = np.zeros(layer.y_shape, np.float32)
    seen = np.pad(x, ((0, 0), (0, 0), *layer.padding)).astype(np.float64)
    for c, r, s in itertools.product(range(layer.C), range(layer.R), range(layer.S)):
        pixels = seen[:, c, r : r + layer.P, s : s + layer.Q]
        out = (out + np.multiply.outer(w[:, c, r, s].astype(np.float64), pixels[0])[np.newaxis]).astype(np.float32)
    return out


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.parametrize(
    ("family", "R", "tile"), [("direct", 1, ""), ("winograd", 3, "2x2"), ("gemm", 1, ""), ("gemm.packed", 1, "")]
)
def test_sums_over_many_channels_err_less_than_one_by_one(family: str, R: int, tile: str) -> None:
    """As they add up sums of some, however many channels a candidate takes at a time."""
    layer = ConvLayer(N=1, C=1536, H=5, W=5, K=32, R=R, S=R, padding=R // 2)
    x, w = drawn(layer)
    long_sum = measured(layer, x, w, one_by_one(layer, x, w))[1]
    assert errors(family, layer, tile)[1] <= 0.5 * long_sum
    assert errors(family, layer, tile, long=True)[1] <= 0.75 * long_sum


def test_what_is_expected_of_sums_is_how_they_are_summed() -> None:
    assert accuracy.SUMMED == sums.SUM_TERMS


if __name__ == "__main__":
    block = re.compile(rf"{re.escape(MARK)}\n.*?\n\n", re.DOTALL)
    lines = "\n".join(table())
    PAGE.write_text(block.sub(f"{MARK}\n{lines}\n\n", PAGE.read_text()))
