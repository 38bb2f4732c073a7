"""Convolution as a product of spectra: transforms by cuFFT, products by cuBLAS, what lies between by own kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoconv.algorithm import PADDING_ONLY, Array, Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import CudaAlgorithm, Launch, aligned, ceil_div
from autoconv.cuda.common.model import Demand, beyond_cache, library_pass, library_product, streaming
from autoconv.cuda.libraries.cublas_cufft import LibraryError, Matrices, Transform, product
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 256
SQUARE = 32  # of a transpose
TILES = (16, 32, 0)  # of a tile; 0 is the whole image
LONGEST = 512  # of a transform
MOST_FILTER_BYTES = 1 << 30  # of the filters' spectra


@dataclass(frozen=True)
class TiledAxis:
    """How tiles cover one axis: `count` transforms of `length`, `stride` results apart, the first at `offset`."""

    length: int
    stride: int
    count: int
    offset: int


def tiled(layer: ConvLayer, axis: int, tile: int) -> TiledAxis:
    """Tiles of a side, or the one that holds all, which is of the next length without factors above 7."""
    stride, span = layer.stride[axis], layer.filter_extent[axis]
    offset = -layer.padding[axis][0]
    results = ((layer.P, layer.Q)[axis] - 1) * stride + 1
    if layer.direction == "dgrad":
        results, offset, stride = (layer.H, layer.W)[axis], 1 - span - offset, 1
    least = results + span - 1
    whole = next(length for length in itertools.count(least) if pow(210, 64, length) == 0)
    if not 0 < tile < whole:
        return TiledAxis(whole, results, 1, offset)
    apart = (tile - span + 1) // stride * stride
    return TiledAxis(tile, apart, ceil_div(results, apart) if apart > 0 else 0, offset)


class FFT(CudaAlgorithm):
    """Overlap-save tiles of `tile` by `tile`, or whole images, IMAGES of them at a time.

    Mathieu, Henaff & LeCun, "Fast Training of Convolutional Networks through FFTs" (2014); tiles as in Vasilache,
    Johnson, Mathieu, Chintala, Piantino & LeCun, "Fast Convolutional Nets With fbfft" (2015). Strided results are
    picked from all, strided gradients and dilated filters spread out.
    """

    name = "fft"
    files = ("fft/fft.cu",)
    spreads_nonfinite = True

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        divisors = [n for n in range(1, layer.N + 1) if layer.N % n == 0]
        some = sorted({divisors[0], divisors[len(divisors) // 2], divisors[-1]})
        return ({"tile": tile, "IMAGES": images} for tile in TILES for images in some)

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        tile, images = int(params["tile"]), int(params["IMAGES"])
        reasons = []
        if tile not in TILES:
            reasons.append(f"tile={tile}: expected {' or '.join(map(str, TILES))}")
        if images < 1 or layer.N % images:
            reasons.append(f"IMAGES={images}: expected a divisor of N={layer.N}")
        if layer.R == layer.S == 1:
            reasons.append("filter: expected more than one tap, got 1x1, which is a product already")
        if layer.sees_padding_only:
            reasons.append(PADDING_ONLY)
        rows, columns = _axes(layer, params)
        for name, axis, span in zip(("rows", "columns"), (rows, columns), layer.filter_extent, strict=True):
            if axis.count != 1 and axis.stride < tile // 2:
                reasons.append(
                    f"tile={tile}: expected a filter that leaves half of its {name}, got one that spans {span}"
                )
            if axis.length > LONGEST:
                reasons.append(f"transforms: expected at most {LONGEST} {name}, got {axis.length}")
        if tile and rows.count == columns.count == 1:
            reasons.append(f"tile={tile}: expected 0, which is the same for an image that fits into one tile")
        if not reasons and (nbytes := self._packed(layer, params)) > MOST_FILTER_BYTES:
            expected = f"at most {MOST_FILTER_BYTES >> 20} MiB"
            reasons.append(f"spectra of the filters: expected {expected}, got {nbytes >> 20} MiB")
        if not reasons and max(_planes(layer, params)) >= 2**31:
            reasons.append("transforms: expected fewer than 2**31")
        return reasons

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        if not reasons:
            try:
                device.blas()
                _plans(device, layer, params)
            except LibraryError as error:
                reasons.append(str(error))
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """For so many images, in the order of launch; the first one packs, where there are filters to pack."""
        some = layer.replace(N=int(params["IMAGES"]))
        rows, columns = _axes(layer, params)
        sources, gradients, sums = _planes(layer, params)
        area, frequencies = rows.length * columns.length, _frequencies(layer, params)
        constants = tuple(
            (f"{name}_{letter}", value)
            for letter, axis in (("H", rows), ("W", columns))
            for name, value in (
                ("F", axis.length), ("TILE_STRIDE", axis.stride), ("COUNT", axis.count), ("TILE_OFFSET", axis.offset)
            )
        )  # fmt: skip
        text = _circle("H", rows.length) + _circle("W", columns.length)
        blocks = 2 if layer.dtype == "float64" else 4

        def unit(name: str, elements: int) -> Unit:
            return Unit(
                name, *self.files, some, (ceil_div(elements, THREADS), 1, 1), THREADS, blocks, constants=constants,
                preamble=text,
            )  # fmt: skip

        def transpose(name: str, planes: int) -> Unit:
            squares = ceil_div(planes, SQUARE) * ceil_div(frequencies, SQUARE)
            shared = SQUARE * (SQUARE + 1) * 2 * layer.accumulator.itemsize
            grid = (squares, 1, 1)
            return Unit(name, *self.files, some, grid, THREADS, blocks, shared, constants=constants, preamble=text)

        cut = unit("fft_cut", sources * area), transpose("fft_transpose", sources)
        if layer.direction == "wgrad":
            gradient = unit("fft_cut_gradient", gradients * area), transpose("fft_transpose_gradient", gradients)
            return *cut, *gradient, transpose("fft_transpose_back", sums), unit("fft_taps", math.prod(layer.w_shape))
        outputs = math.prod(some.output_shape)
        filters = unit("fft_filter", frequencies * _pairs(layer))
        return filters, *cut, transpose("fft_transpose_back", sums), unit("fft_output", outputs)

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return sum(_parts(device, layer, params))

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return self._packed(layer, params) if layer.direction != "wgrad" else 0

    def _packed(self, layer: ConvLayer, params: Params) -> int:
        return 2 * layer.accumulator.itemsize * _frequencies(layer, params) * _pairs(layer)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        rows, columns = _axes(layer, params)
        sources, gradients, sums = _planes(layer, params)
        times, tiles = layer.N // int(params["IMAGES"]), int(params["IMAGES"]) * rows.count * columns.count
        C, K, wgrad = layer.C // layer.groups, layer.K // layer.groups, layer.direction == "wgrad"
        frequencies, number = _frequencies(layer, params), 2 * layer.accumulator.itemsize
        spectrum = float(frequencies * number)
        scratch = beyond_cache(device, (sources + gradients * wgrad + sums) * spectrum)
        area = rows.length * columns.length
        butterflies = 2.5 * area * math.log2(area) / 32  # warp instructions of a plane's transform
        found = []
        for unit in self.units(layer, params):
            planes = {"fft_cut": sources, "fft_transpose": sources}.get(unit.function, sums)
            planes = gradients if "gradient" in unit.function else planes
            if unit.function != "fft_filter":
                found.append(streaming(unit, 2 * planes * spectrum))
        found += [
            library_pass(2 * planes * spectrum, planes * butterflies, 0.0)
            for planes in (sources, gradients if wgrad else 0, sums)
            if planes
        ]
        extents = {"fwd": (K, tiles, C), "dgrad": (C, tiles, K), "wgrad": (K, C, tiles)}[layer.direction]
        product = library_product(*extents, frequencies * layer.groups, number, factor=4)
        packed = 0 if wgrad else self._packed(layer, params)
        return [*found, replace(product, memory=layer.bytes / times + packed + scratch)] * times

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        units = self.units(layer, params)
        launches = dict(zip((unit.function for unit in units), self.load(device, units), strict=True))
        packed = self.packed_bytes(layer, device, params)
        return Spectral(device, layer, params, launches, packed)


class Spectral(Kernel):
    """Planes, spectra and transposed spectra take two buffers in turn; wgrad keeps one of x, and one of the sums."""

    def __init__(
        self, device: CUDA, layer: ConvLayer, params: Params, launches: dict[str, Launch], packed_bytes: int
    ) -> None:
        self._layer, self._images, self._address = layer, int(params["IMAGES"]), device.address
        self._launches, self.packed_bytes = launches, packed_bytes
        self._plans = _plans(device, layer, params)
        self._parts = _parts(device, layer, params)
        self.workspace_bytes = sum(self._parts)
        groups, C, K = layer.groups, layer.C // layer.groups, layer.K // layer.groups
        rows, columns = _axes(layer, params)
        tiles = self._images * rows.count * columns.count
        batch = _frequencies(layer, params) * groups
        if layer.direction == "wgrad":
            extents = K, C, tiles
            operands = Matrices(1, K, tiles * K), Matrices(C, 1, tiles * C), Matrices(C, 1, K * C)
        else:
            into, out = (C, K) if layer.direction == "fwd" else (K, C)
            extents = tiles, out, into
            operands = (
                Matrices(into, 1, tiles * into),
                Matrices(out, 1, into * out),
                Matrices(out, 1, tiles * out),
            )
        number = "complex128" if layer.dtype == "float64" else "complex64"
        self._multiply = product(device.blas(), (number, number), extents, batch, *operands)

    def pack(self, w: Array, packed: Array) -> None:
        if not self.packed_bytes:
            super().pack(w, packed)
        self._launches["fft_filter"](w, packed)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        ends = list(itertools.accumulate(self._parts))
        first, second, third, sums, scratch = (
            workspace[start:end] for start, end in zip((0, *ends), ends, strict=False)
        )
        images, launches, wgrad = self._images, self._launches, self._layer.direction == "wgrad"
        blas = self._address(scratch)
        for n in range(0, self._layer.N, images):
            self._spectra(
                "fft_cut", "fft_transpose", 0, a[n : n + images], (first, second, third if wgrad else first), scratch
            )
            if wgrad:
                buffers = first, second, first
                self._spectra("fft_cut_gradient", "fft_transpose_gradient", 1, b[n : n + images], buffers, scratch)
                self._multiply(self._address(first), self._address(third), self._address(sums), blas, n > 0)
            else:
                self._multiply(self._address(first), self._address(b), self._address(second), blas, False)
                self._planes(second, first, scratch)
                some = None if residual is None else residual[n : n + images]
                launches["fft_output"](second, out[n : n + images], bias, some)
        if wgrad:
            self._planes(sums, first, scratch, into=second)
            launches["fft_taps"](second, out)

    def _spectra(
        self, cut: str, transpose: str, plan: int, source: Array, buffers: tuple[Array, Array, Array], scratch: Array
    ) -> None:
        """Of some images: planes in the first buffer, spectra in the second, frequencies first in the third."""
        planes, spectra, transposed = buffers
        self._launches[cut](source, planes)
        self._plans[plan].run(self._address(planes), self._address(spectra), self._address(scratch))
        self._launches[transpose](spectra, transposed)

    def _planes(self, sums: Array, spectra: Array, scratch: Array, into: Array | None = None) -> None:
        """Back again, by way of `spectra`, into the buffer that the sums came from or another one."""
        target = sums if into is None else into
        self._launches["fft_transpose_back"](sums, spectra)
        self._plans[-1].run(self._address(spectra), self._address(target), self._address(scratch))


def _axes(layer: ConvLayer, params: Params) -> tuple[TiledAxis, TiledAxis]:
    tile = int(params["tile"])
    return tiled(layer, 0, tile), tiled(layer, 1, tile)


def _frequencies(layer: ConvLayer, params: Params) -> int:
    rows, columns = _axes(layer, params)
    return rows.length * (columns.length // 2 + 1)


def _pairs(layer: ConvLayer) -> int:
    """Of input and output channels that a filter joins: each has a plane, or a spectrum."""
    return layer.K * layer.C // layer.groups


def _planes(layer: ConvLayer, params: Params) -> tuple[int, int, int]:
    """Planes of the source, of wgrad's gradient, and of the result, of some images."""
    rows, columns = _axes(layer, params)
    tiles = int(params["IMAGES"]) * rows.count * columns.count
    return {
        "fwd": (tiles * layer.C, 0, tiles * layer.K),
        "dgrad": (tiles * layer.K, 0, tiles * layer.C),
        "wgrad": (tiles * layer.C, tiles * layer.K, _pairs(layer)),
    }[layer.direction]


def _plans(device: CUDA, layer: ConvLayer, params: Params) -> list[Transform]:
    """Of the source, of wgrad's gradient, and back."""
    rows, columns = _axes(layer, params)
    sources, gradients, sums = _planes(layer, params)
    lengths, dtype = (rows.length, columns.length), layer.accumulator.name
    there = [device.fourier(lengths, planes, dtype, False) for planes in (sources, gradients) if planes]
    return [*there, device.fourier(lengths, sums, dtype, True)]


def _parts(device: CUDA, layer: ConvLayer, params: Params) -> tuple[int, ...]:
    """Bytes: two buffers for any planes or spectra, x's spectra and the sums of wgrad, what both libraries work in."""
    spectrum = 2 * layer.accumulator.itemsize * _frequencies(layer, params)
    planes = _planes(layer, params)
    wgrad = layer.direction == "wgrad"
    kept = (planes[0], planes[2]) if wgrad else (0, 0)
    sizes = (
        *(spectrum * number for number in (max(planes), max(planes), *kept)),
        max(device.blas().workspace_bytes, *(plan.workspace_bytes for plan in _plans(device, layer, params))),
    )
    return tuple(map(aligned, sizes))


def _circle(letter: str, length: int) -> str:
    """The tables of cosines and sines of the multiples of a full turn's `length`-th part."""
    angles = [2 * math.pi * i / length for i in range(length)]
    return "".join(
        f"__device__ const Acc {name}_{letter}[{length}] = {{{', '.join(repr(f(angle)) for angle in angles)}}};\n"
        for name, f in (("COS", math.cos), ("SIN", math.sin))
    )
