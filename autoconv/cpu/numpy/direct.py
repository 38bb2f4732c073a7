"""Direct convolution: for every tap of the filter, one matrix product on shifted pixels, a rank-C update of the sums.

kn2row (Vasudevan, Anderson and Gregg, "Parallel Multi Channel Convolution using General Matrix Multiplication", 2017)
multiplies tap by tap too, all pixels at once, and shifts the products; here the pixels are shifted, block by block.
Takes every layer, needs no workspace and no padded copy: taps that fall on padding are left out of the
sums. What it holds besides its operands are five blocks of 256 KiB at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from autoconv.algorithm import Array, Params
from autoconv.cpu.device import CPU
from autoconv.cpu.numpy.common import (
    NumpyAlgorithm,
    NumpyKernel,
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

BLOCK_BYTES = 256 << 10  # of each temporary
PIXELS = 512  # of a block: enough columns for BLAS, few enough to leave room for channels


class _Block:
    """A temporary, reused for every shape that fits into it."""

    def __init__(self, elements: int, dtype: object) -> None:
        self._flat = np.empty(elements, dtype)  # type: ignore[call-overload]

    def shaped(self, *shape: int) -> Array:
        return self._flat[: math.prod(shape)].reshape(shape)

    def filled(self, array: Array) -> Array:
        """A contiguous copy, in the type of the sums."""
        copy = self.shaped(*array.shape)
        copy[...] = array
        return copy


class NumpyDirectKernel(NumpyKernel):
    """Blocks of groups, channels and pixels; within a block, tap by tap."""

    def __init__(self, layer: ConvLayer, device: CPU) -> None:
        super().__init__(layer, device)
        self._elements = BLOCK_BYTES // layer.accumulator.itemsize

    def compute(
        self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        if self.layer.direction == "wgrad":
            self._wgrad(a, b, out)
        else:
            self._images(a, b if self.layer.direction == "fwd" else b.swapaxes(1, 2), out, bias, residual)

    def _pixel_block(self, N: int, rows: int, columns: int) -> tuple[int, int, int]:
        """Images, rows and columns that make up to `PIXELS` pixels."""
        across = min(columns, PIXELS)
        down = min(rows, PIXELS // across)
        return min(N, PIXELS // (across * down)), down, across

    def _channel_block(self, shape: tuple[int, ...], pixels: int, steps: int = 1) -> tuple[int, int, int]:
        """Groups, filters and channels whose blocks with the pixels, and with each other, all fit.

        Filters meet all pixels, and channels one in `steps`.
        """
        most = math.isqrt(self._elements)
        filters = min(shape[1], most, self._elements // pixels)
        channels = min(shape[2], most, self._elements // (pixels // steps))
        largest = max(filters * pixels, channels * pixels // steps, filters * channels)
        return min(shape[0], self._elements // largest), filters, channels

    def _taps(self, axis: int) -> Iterator[tuple[int, int]]:
        """The taps of one axis, with the image row (or column) that output pixel 0 meets through each."""
        layer = self.layer
        return ((n, n * layer.dilation[axis] - layer.padding[axis][0]) for n in range((layer.R, layer.S)[axis]))

    def _meetings(self, axis: int, block: Span) -> list[tuple[int, slice, slice]]:
        """The taps that join the block of the target's rows (or columns) with any of the source's, and where.

        The forward pass reads image pixel `start + p * stride` for output pixel p; dgrad writes it.
        """
        layer, stride, first, found = self.layer, self.layer.stride[axis], block[0], []
        for tap, start in self._taps(axis):
            if layer.direction == "fwd":
                start += first * stride
                span = overlap(block[1] - first, (layer.H, layer.W)[axis], stride, start)
                to, of = slice(*span), window(span, stride, start)
            else:
                start -= first
                span = overlap((layer.P, layer.Q)[axis], block[1] - first, stride, start)
                to, of = window(span, stride, start), slice(*span)
            if span[0] < span[1]:
                found.append((tap, to, of))
        return found

    def _images(self, source: Array, w: Array, out: Array, bias: Array | None, residual: Array | None) -> None:
        layer, N, (rows, columns) = self.layer, out.shape[0], out.shape[-2:]
        # A tap of dgrad joins every stride-th row and column of a block: where the sums fit, more are taken.
        steps = (1, 1) if layer.direction == "fwd" else layer.stride
        if w.shape[1] * PIXELS * math.prod(steps) > self._elements:
            steps = 1, 1
        images, down, across = self._pixel_block(N, -(-rows // steps[0]), -(-columns // steps[1]))
        down, across = down * steps[0], across * steps[1]
        grouped, some, few = self._channel_block(w.shape, images * down * across, math.prod(steps))
        sums, *parts = (_Block(self._elements, layer.accumulator) for _ in range(4))
        for g, k, n, p, q in itertools.product(
            spans(w.shape[0], grouped),
            spans(w.shape[1], some),
            spans(N, images),
            spans(rows, down),
            spans(columns, across),
        ):
            acc = sums.shaped(*(last - first for first, last in (g, k, n, p, q)))
            acc[...] = 0
            for c in spans(w.shape[2], few):
                self._add_taps(acc, source[at(n, g, c)], w[at(g, k, c)], p, q, parts)
            finish(
                acc.transpose(2, 0, 1, 3, 4),
                out[at(n, g, k, p, q)],
                None if bias is None else bias[:, *at(g, k)],
                None if residual is None else residual[at(n, g, k, p, q)],
                layer.activation,
            )

    def _add_taps(self, acc: Array, source: Array, w: Array, p: Span, q: Span, parts: list[_Block]) -> None:
        """Add to a block of the target (`groups, filters, N, rows, columns`) what these channels give it."""
        matrices, pixels, products = parts
        joined = itertools.product(self._meetings(0, p), self._meetings(1, q))
        for (r, to_rows, from_rows), (s, to_columns, from_columns) in joined:
            part = source[..., from_rows, from_columns].transpose(1, 2, 0, 3, 4)
            patch = pixels.filled(part)
            matrix = matrices.filled(w[..., r, s])
            product = products.shaped(*matrix.shape[:2], *part.shape[2:])
            multiply(matrix, patch.reshape(*part.shape[:2], -1), product.reshape(*matrix.shape[:2], -1))
            acc[..., to_rows, to_columns] += product

    def _wgrad(self, x: Array, dy: Array, dw: Array) -> None:
        layer = self.layer
        images, down, across = self._pixel_block(layer.N, layer.P, layer.Q)
        grouped, some, few = self._channel_block(dw.shape, images * down * across)
        products, pixels, gradients = (_Block(self._elements, layer.accumulator) for _ in range(3))
        blocks = spans(dw.shape[0], grouped), spans(dw.shape[1], some), spans(dw.shape[2], few)
        for g, k, c, (r, top), (s, left) in itertools.product(*blocks, self._taps(0), self._taps(1)):
            product = products.shaped(*(last - first for first, last in (g, k, c)))
            acc = np.zeros(product.shape)  # float64: thousands of partial sums meet in few numbers
            rows = overlap(layer.P, layer.H, layer.stride[0], top)
            columns = overlap(layer.Q, layer.W, layer.stride[1], left)
            for n, p, q in itertools.product(spans(layer.N, images), spans(*rows, down), spans(*columns, across)):
                reached = window(p, layer.stride[0], top), window(q, layer.stride[1], left)
                part = dy[at(n, g, k, p, q)].transpose(1, 2, 0, 3, 4)
                patch = x[(*at(n, g, c), *reached)].transpose(1, 2, 0, 3, 4)
                left_matrix = gradients.filled(part).reshape(*part.shape[:2], -1)
                right_matrix = pixels.filled(patch).reshape(*patch.shape[:2], -1)
                np.matmul(left_matrix, right_matrix.swapaxes(1, 2), out=product)
                acc += product
            dw[(*at(g, k, c), r, s)] = acc


class NumpyDirect(NumpyAlgorithm):
    """Rank-C updates, tap by tap, on shifted views of the input."""

    name = "numpy.direct"
    takes_all = True
    exact = True
    stands_in_for = "direct"
    skips_padding = True
    kernel = NumpyDirectKernel

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return ({},)

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        return []

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        # For every multiply-add of a tap, the product is written and then added to the sums.
        outputs = math.prod(layer.output_shape) * layer.accumulator.itemsize
        traffic = layer.bytes + 4.0 * outputs * (layer.R * layer.S if layer.direction != "wgrad" else 1)
        blocks = math.ceil(layer.N * layer.P * layer.Q / PIXELS) * math.ceil(max(layer.C, layer.K) / 128)
        calls = 8 * call_seconds(device) * blocks * layer.R * layer.S
        return layer.flops / (0.5 * device.peak_flops(layer.dtype)) + traffic / device.bandwidth() + calls
