"""Quantised layers by their definition, in int64, one tap at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from guards import run_guarded

from autoconv.algorithm import Candidate
from autoconv.common.epilogue.quantization import Quantization
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

Array = np.ndarray[Any, Any]


def sums(layer: ConvLayer, x: Array, w: Array, x_zero_point: int = 0, w_zero_point: Any = 0) -> Array:
    """`sum((x - x_zero_point) * (w - w_zero_point))`, as N, K, P, Q."""
    x, w = x.astype(np.int64) - x_zero_point, w.astype(np.int64)
    if layer.layout == "NHWC":
        x, w = x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2)
    w = w - np.reshape(w_zero_point, (-1, 1, 1, 1))
    x = np.pad(x, ((0, 0), (0, 0), *layer.padding))
    found = np.zeros((layer.N, layer.K, layer.P, layer.Q), np.int64)
    per_group, (down, across) = layer.K // layer.groups, layer.stride
    for r in range(layer.R):
        for s in range(layer.S):
            top, left = r * layer.dilation[0], s * layer.dilation[1]
            seen = x[:, :, top::down, left::across][:, :, : layer.P, : layer.Q]
            for group, pixels in enumerate(np.split(seen, layer.groups, axis=1)):
                filters = slice(group * per_group, (group + 1) * per_group)
                found[:, filters] += np.einsum("nchw,kc->nkhw", pixels, w[filters, :, r, s])
    return found


def output(layer: ConvLayer, s: Array, scale: Any = 1.0, y_zero_point: int = 0, bias: Any = 0) -> Array:
    """What `Quantization` says of sums (N, K, P, Q): each rounding is one of a number that float64 holds exactly."""
    per_filter = [np.broadcast_to(np.asarray(a), (layer.K,)).reshape(-1, 1, 1) for a in (scale, bias)]
    total = s + per_filter[1]
    if layer.activation == "relu":
        total = np.maximum(total, 0)
    if layer.output_dtype != "int32":
        rounded = total.astype(np.float32).astype(np.float64)
        total = (rounded * per_filter[0].astype(np.float32).astype(np.float64)).astype(np.float32)
    if layer.output_dtype in ("uint8", "int8"):
        limits = np.iinfo(layer.output_dtype)
        total = np.clip(np.rint(total.astype(np.float64)) + y_zero_point, limits.min, limits.max)
    y = total.astype(layer.output_dtype)
    return y if layer.layout == "NCHW" else y.transpose(0, 2, 3, 1)


# What multiplies words on a processor, and how an assembler writes it.
INSTRUCTIONS = [
    ("cascadelake", "avx512", "vpdpbusd", r"vpdpbusd.*%zmm"),
    ("alderlake", "avx2", "vpdpbusd", r"\{vex\}\s+vpdpbusd.*%ymm"),
    ("haswell", "avx2", "pmaddwd", r"vpmaddwd.*%ymm"),
]


def drawn(layer: ConvLayer, seed: int = 0) -> tuple[Array, Array]:
    """Input and filters over the whole range of their types."""
    rng = np.random.default_rng(seed)
    limits = np.iinfo(layer.dtype)
    x = rng.integers(limits.min, limits.max, layer.x_shape, layer.dtype, endpoint=True)
    return x, rng.integers(-128, 127, layer.w_shape, np.int8, endpoint=True)


def device_for(instruction_set: str, product: str) -> CPU:
    """One of some vectors, with what multiplies words; where an instruction is not there, arithmetic does the same."""
    unit = "emulated" if product == "tdpbusd" else None
    return CPU(threads=2, instruction_set=instruction_set, matrix_unit=unit)


def meaning(layer: ConvLayer) -> dict[str, Any]:
    """Zero points, scales and a bias that use the output's range, and go beyond it."""
    rng = np.random.default_rng(1)
    middle = {"uint8": 128, "int8": 0}
    terms = layer.C // layer.groups * layer.R * layer.S
    found: dict[str, Any] = {"bias": rng.integers(-9999, 9999, layer.K)}
    found["x_zero_point"] = middle[layer.dtype] + int(rng.integers(-100, 100))
    if layer.output_dtype != "int32":
        found["scale"] = (rng.uniform(0.5, 2, layer.K) / (60 * np.sqrt(terms))).astype(np.float32)
    if layer.output_dtype in middle:
        found["y_zero_point"] = middle[layer.output_dtype] + int(rng.integers(-60, 60))
    return found


def expected(layer: ConvLayer, x: Any, w: Any, given: dict[str, Any]) -> Any:
    rest = {name: value for name, value in given.items() if name != "x_zero_point"}
    return output(layer, sums(layer, x, w, given["x_zero_point"]), **rest)


def check(layer: ConvLayer, device: CPU, family: Any, params: dict[str, Any]) -> None:
    assert family.why_not(layer, device, params) == []
    x, w = drawn(layer)
    given = meaning(layer)
    arrays = x, w, Quantization(**given).operand(layer), None
    want = expected(layer, x, w, given)
    for side in ("before", "after"):
        got = run_guarded(family, layer, device, Candidate(family.name, tuple(params.items())), arrays, side)
        np.testing.assert_array_equal(got, want, err_msg=f"{params} on {layer}")
