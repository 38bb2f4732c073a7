"""Convolution as a product of spectra, of whole images or of overlap-save tiles.

Mathieu, Henaff and LeCun, "Fast Training of Convolutional Networks through FFTs" (2014); overlap-save after Stockham,
"High-speed convolution and correlation" (1966).

With X and W the transforms of zero-extended image and filter planes, `Y = sum_C X conj(W)`, one matrix product of
images by channels for every frequency. dgrad is the same on the gradient, spread out by the stride, with the filters
rotated by 180 degrees and transposed; wgrad is `DW = sum_N X conj(DY)`, cut to the taps. Dilated filters are spread out
before they are transformed. Strided outputs are picked from those of stride 1.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoconv.algorithm import PADDING_ONLY, Array, Params
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.common import (
    NumpyAlgorithm,
    NumpyKernel,
    Scratch,
    Span,
    at,
    call_seconds,
    finish,
    multiply,
    overlap,
    spans,
    window,
)
from autoconv.layer import ConvLayer

TILES = (0, 32, 64)  # 0 is the whole image
PLANES_BYTES = 1 << 20  # of real planes transformed at a time; SciPy allocates as much for the result
BLOCK_BYTES = 64 << 20  # of spectra held at a time, if an image needs no more
LARGEST = 256 << 20  # bytes of filter spectra; layers beyond are deep, small in area, and slower than their GEMM


@dataclass(frozen=True)
class OverlapSaveAxis:
    """How tiles cover one axis: `count` transforms of length F, `step` positions of the output apart.

    A tile starts at `start + t * step` in the source, which is spread out by `up`, and its outputs depend
    on `reach` positions. The first `step` results are free of wrap-around; every `stride`-th is an output.
    """

    F: int
    reach: int
    step: int
    count: int
    start: int
    up: int
    stride: int


@functools.cache
def _library() -> Any:
    """SciPy's transforms, imported when the first one runs: it takes as long as all of autoconv."""
    return importlib.import_module("scipy.fft")


@functools.cache
def _fast_length(least: int) -> int:
    """The next length without prime factors above 5: the one that divides a power of 30."""
    return next(length for length in itertools.count(least) if pow(30, 64, length) == 0)


def _axis(layer: ConvLayer, axis: int, tile: int) -> OverlapSaveAxis:
    stride, span = layer.stride[axis], layer.filter_extent[axis]
    up, start = 1, -layer.padding[axis][0]
    outputs = ((layer.P, layer.Q)[axis] - 1) * stride + 1
    if layer.direction == "dgrad":
        outputs, up, start, stride = (layer.H, layer.W)[axis], stride, 1 - span - start, 1
    reach = outputs + span - 1
    whole = _fast_length(reach)
    if not 0 < tile < whole:
        return OverlapSaveAxis(whole, reach, outputs, 1, start, up, stride)
    step = (tile - span + 1) // stride * stride
    return OverlapSaveAxis(tile, step + span - 1, step, -(-outputs // step) if step > 0 else 0, start, up, stride)


def _place(plane: Array, source: Array, steps: Span, starts: Span) -> None:
    """Write the source over zeros, its pixel i to `starts + i * steps`, where that is inside the plane."""
    i = overlap(source.shape[-2], plane.shape[-2], steps[0], starts[0])
    j = overlap(source.shape[-1], plane.shape[-1], steps[1], starts[1])
    plane[..., window(i, steps[0], starts[0]), window(j, steps[1], starts[1])] = source[..., slice(*i), slice(*j)]


class NumpyFFTKernel(NumpyKernel):
    """Blocks of images; all tiles and channels of a block are transformed, multiplied, transformed back."""

    def __init__(self, layer: ConvLayer, device: CPU, tile: int) -> None:
        super().__init__(layer, device)
        self.axes = rows, columns = _axis(layer, 0, tile), _axis(layer, 1, tile)
        self.complex = np.dtype(np.complex128 if layer.dtype == "float64" else np.complex64)
        self.frequencies = rows.F, columns.F // 2 + 1
        self.tiles = rows.count * columns.count
        weights = layer.K * (layer.C // layer.groups)
        number = math.prod(self.frequencies) * self.complex.itemsize
        self.at_once = min(layer.N, max(1, BLOCK_BYTES // (number * self.tiles * (layer.C + layer.K))))
        plane = rows.F * columns.F
        self.planes = max(1, PLANES_BYTES // (plane * layer.accumulator.itemsize))
        matrices = self.at_once * self.tiles
        arrays: dict[str, tuple[tuple[int, ...], Any]] = {
            "planes": ((min(self.planes, max(layer.C, layer.K)) * plane,), layer.accumulator),
            "C": ((*self.frequencies, matrices * layer.C), self.complex),
            "K": ((*self.frequencies, matrices * layer.K), self.complex),
        }
        if layer.direction == "wgrad":
            arrays["sums"] = (*self.frequencies, weights), self.complex
            if self.at_once < layer.N:
                arrays["product"] = arrays["sums"]
        else:
            self.packed_bytes = weights * number
        self.scratch = Scratch(**arrays)

    def transform(self, w: Array, packed: Array) -> None:
        """The filters' spectra, conjugated: frequencies, groups, inputs, outputs."""
        layer = self.layer
        w = w.swapaxes(1, 2) if layer.direction == "fwd" else w[..., ::-1, ::-1]
        spectra = packed.view(self.complex).reshape(*self.frequencies, *w.shape[:3])
        groups, inputs, outputs = w.shape[:3]
        few = min(outputs, self.planes)
        some = min(inputs, self.planes // few)
        for g, c, k in itertools.product(
            spans(groups, self.planes // (some * few)), spans(inputs, some), spans(outputs, few)
        ):
            part = w[at(g, c, k)]
            planes = np.zeros((*part.shape[:3], *(axis.F for axis in self.axes)), layer.accumulator)
            _place(planes, part, layer.dilation, (0, 0))
            spectrum = _library().rfft2(planes, workers=self.threads)
            spectra[(slice(None), slice(None), *at(g, c, k))] = spectrum.conj().transpose(3, 4, 0, 1, 2)

    def compute(
        self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        if self.layer.direction == "wgrad":
            self._wgrad(a, b, out, scratch)
        else:
            self._images(a, b, out, bias, residual, scratch)

    def _tiles(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.axes[0].count), range(self.axes[1].count))

    def _matrices(self, spectra: Array, channels: int, images: int) -> Array:
        """Scratch spectra as `frequencies, groups, images and tiles, channels`."""
        groups = self.layer.groups
        flat = spectra[..., : images * self.tiles * channels]
        return flat.reshape(*self.frequencies, -1, groups, channels // groups).swapaxes(2, 3)

    def _transform(self, spectra: Array, source: Array, scratch: dict[str, Array], gradient: bool = False) -> Array:
        """The spectra of a block of images, tile by tile; for wgrad's gradient conjugated, on disjoint tiles."""
        rows, columns = self.axes
        images, channels = source.shape[0], source.shape[1] * source.shape[2]
        source = source.reshape(images, channels, *source.shape[3:])
        into = spectra[..., : images * self.tiles * channels].reshape(*self.frequencies, -1, channels)
        places = itertools.product(range(images), self._tiles())
        for index, (n, (y, x)) in enumerate(places):
            starts = -rows.start - y * rows.step, -columns.start - x * columns.step
            for c in spans(channels, self.planes):
                count = c[1] - c[0]
                planes = scratch["planes"][: count * rows.F * columns.F].reshape(count, rows.F, columns.F)
                planes[...] = 0
                if gradient:
                    tile = planes[:, : rows.step, : columns.step]
                    _place(tile, source[n, slice(*c)], self.layer.stride, (-y * rows.step, -x * columns.step))
                else:
                    tile = planes[:, : rows.reach, : columns.reach]
                    _place(tile, source[n, slice(*c)], (rows.up, columns.up), starts)
                spectrum = _library().rfft2(planes, workers=self.threads)
                if gradient:
                    np.conjugate(spectrum, out=spectrum)
                into[:, :, index, slice(*c)] = spectrum.transpose(1, 2, 0)
        return self._matrices(spectra, channels, images)

    def _planes(self, spectra: Array) -> Array:
        """The planes of spectra of shape frequencies, planes."""
        lengths = self.axes[0].F, self.axes[1].F
        return _library().irfft2(spectra.transpose(2, 0, 1), s=lengths, workers=self.threads)

    def _images(
        self, source: Array, packed: Array, out: Array, bias: Array | None, residual: Array | None, scratch: Any
    ) -> None:
        layer, (rows, columns) = self.layer, self.axes
        inputs, outputs = ("C", "K") if layer.direction == "fwd" else ("K", "C")
        groups, filters, channels = out.shape[1], out.shape[2], source.shape[2]
        spectra = packed.view(self.complex).reshape(*self.frequencies, groups, channels, filters)
        flat = out.shape[0], groups * filters, *out.shape[3:]
        y, residual = out.reshape(flat), None if residual is None else residual.reshape(flat)
        bias = None if bias is None else bias.reshape(len(bias), -1, 1, 1)
        for n in spans(layer.N, self.at_once):
            count = n[1] - n[0]
            transformed = self._transform(scratch[inputs], source[at(n)], scratch)
            multiply(transformed, spectra, out=self._matrices(scratch[outputs], groups * filters, count))
            products = scratch[outputs][..., : count * self.tiles * flat[1]].reshape(*self.frequencies, -1, flat[1])
            for index, (image, (i, j)) in enumerate(itertools.product(range(*n), self._tiles())):
                p, q = i * rows.step // rows.stride, j * columns.step // columns.stride
                for k in spans(flat[1], self.planes):
                    planes = self._planes(products[:, :, index, slice(*k)])
                    results = planes[:, : rows.step : rows.stride, : columns.step : columns.stride]
                    where = image, slice(*k), slice(p, p + results.shape[1]), slice(q, q + results.shape[2])
                    target = y[where]
                    sums = results[:, : target.shape[1], : target.shape[2]]
                    part = None if residual is None else residual[where]
                    finish(sums, target, None if bias is None else bias[:, *at(k)], part, layer.activation)

    def _wgrad(self, x: Array, dy: Array, dw: Array, scratch: dict[str, Array]) -> None:
        layer = self.layer
        shape = (*self.frequencies, *dw.shape[:3])
        for n in spans(layer.N, self.at_once):
            image = self._transform(scratch["C"], x[at(n)], scratch)
            gradient = self._transform(scratch["K"], dy[at(n)], scratch, gradient=True)
            into = scratch["product" if n[0] else "sums"].reshape(shape)
            multiply(gradient.swapaxes(3, 4), image, out=into)
            if n[0]:
                scratch["sums"].reshape(shape)[...] += into
        filters, channels = dw.shape[1:3]
        sums = scratch["sums"].reshape(*self.frequencies, -1, channels)
        for row in range(sums.shape[2]):
            for c in spans(channels, self.planes):
                planes = self._planes(sums[:, :, row, slice(*c)])
                taps = planes[
                    :, : layer.filter_extent[0] : layer.dilation[0], : layer.filter_extent[1] : layer.dilation[1]
                ]
                dw[row // filters, row % filters, slice(*c)] = taps


class NumpyFFT(NumpyAlgorithm):
    """SciPy's real transforms; `tile` is their length, 0 for one that holds the whole image."""

    name = "numpy.fft"
    stands_in_for = "fft"
    spreads_nonfinite = True
    kernel = NumpyFFTKernel

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return ({"tile": tile} for tile in TILES)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        tile = int(params["tile"])
        reasons = []
        if tile not in TILES:
            reasons.append(f"tile: expected {' or '.join(map(str, TILES))}, got {tile}")
        if layer.R == layer.S == 1:
            reasons.append("filter: expected larger than 1x1, which is a matrix product already")
        if layer.sees_padding_only:
            reasons.append(PADDING_ONLY)
        rows, columns = _axis(layer, 0, tile), _axis(layer, 1, tile)
        for name, axis, span in zip(("rows", "columns"), (rows, columns), layer.filter_extent, strict=True):
            if axis.count != 1 and axis.step < tile // 2:
                reasons.append(f"filter: expected a span that leaves half of a tile of {tile} {name}, got {span}")
        if tile and rows.count == columns.count == 1:
            reasons.append(f"tile: expected smaller than the image, got {tile}, which is the same as 0")
        number = 2 * layer.accumulator.itemsize
        spectra = rows.F * (columns.F // 2 + 1) * layer.K * (layer.C // layer.groups) * number
        if spectra > LARGEST:
            reasons.append(f"the filters' spectra: expected at most {LARGEST >> 20} MiB, got {spectra >> 20}")
        return reasons

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        rows, columns = (_axis(layer, axis, int(params["tile"])) for axis in (0, 1))
        frequencies = rows.F * (columns.F // 2 + 1)
        weights, tiles = layer.K * (layer.C // layer.groups), layer.N * rows.count * columns.count
        planes = tiles * (layer.C + layer.K)
        transforms = 2.5 * rows.F * columns.F * math.log2(rows.F * columns.F) * planes
        peak = device.peak_flops(layer.dtype)
        spectra = 2.0 * layer.accumulator.itemsize * frequencies * (weights + 4 * planes)
        products = 8.0 * frequencies * tiles * weights
        calls = 30 * call_seconds(device) * tiles
        moved = (layer.bytes + spectra) / device.bandwidth()
        return transforms / (0.04 * peak) + products / (0.3 * peak) + moved + calls
