"""What the NumPy algorithms share: views, windows, scratch arrays, blocks, the epilogue, BLAS threads.

Every layout is seen as one: images as `N, groups, channels, height, width`, filters as `groups, filters,
channels, R, S`. The views differ in strides only, and BLAS takes either order, so each algorithm is
written once.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.common.epilogue import activations
from autoconv.cpu.allocator import ALIGNMENT
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

Span = tuple[int, int]  # first and past-last


def call_seconds(device: CPU) -> float:
    """Seconds of one NumPy call, which is what small layers cost: about twice what calling a kernel takes."""
    return 2 * (device.machine.call or 0.0)


def images(array: Array, layer: ConvLayer) -> Array:
    """A batch in the layer's layout, viewed as `N, groups, channels, height, width`."""
    if layer.layout == "NCHW":
        N, channels, height, width = array.shape
        return array.reshape(N, layer.groups, channels // layer.groups, height, width)
    N, height, width, channels = array.shape
    return array.reshape(N, height, width, layer.groups, channels // layer.groups).transpose(0, 3, 4, 1, 2)


def filters(array: Array, layer: ConvLayer) -> Array:
    """Filters in the layer's layout, viewed as `groups, K/groups, C/groups, R, S`."""
    grouped = array.reshape(layer.groups, layer.K // layer.groups, *array.shape[1:])
    return grouped if layer.layout == "NCHW" else grouped.transpose(0, 1, 4, 2, 3)


def overlap(count: int, extent: int, step: int, start: int) -> Span:
    """Which i of `0..count` have `start + i * step` inside `0..extent`."""
    first = min(count, max(0, -(start // step)))
    last = min(count, max(first, (extent - 1 - start) // step + 1))
    return first, last


def window(span: Span, step: int, start: int) -> slice:
    """The places `start + i * step` for i in the span."""
    first, last = span
    return slice(start + first * step, start + (last - 1) * step + 1, step) if last > first else slice(0, 0)


def gather(target: Array, source: Array, steps: Span, starts: Span) -> None:
    """`target[..., i, j] = source[..., starts + (i, j) * steps]`, and 0 outside the source."""
    rows, columns = target.shape[-2:]
    i = overlap(rows, source.shape[-2], steps[0], starts[0])
    j = overlap(columns, source.shape[-1], steps[1], starts[1])
    target[..., : i[0], :] = 0
    target[..., i[1] :, :] = 0
    target[..., slice(*i), : j[0]] = 0
    target[..., slice(*i), j[1] :] = 0
    target[..., slice(*i), slice(*j)] = source[..., window(i, steps[0], starts[0]), window(j, steps[1], starts[1])]


def spread(target: Array, source: Array, steps: Span, starts: Span) -> None:
    """The adjoint of `gather`: `target[..., starts + (i, j) * steps] += source[..., i, j]`."""
    i = overlap(source.shape[-2], target.shape[-2], steps[0], starts[0])
    j = overlap(source.shape[-1], target.shape[-1], steps[1], starts[1])
    target[..., window(i, steps[0], starts[0]), window(j, steps[1], starts[1])] += source[..., slice(*i), slice(*j)]


def spans(*limits: int) -> Iterator[Span]:
    """`spans([start,] stop, size)`: what `range` walks, in spans of at most `size`."""
    *_, stop, size = (0, *limits)
    for first in range(limits[0] if len(limits) == 3 else 0, stop, size):
        yield first, min(first + size, stop)


def at(*block: Span) -> tuple[slice, ...]:
    """Where a block lies, as an index."""
    return tuple(slice(*span) for span in block)


def blocks(N: int, rows: int, budget: int) -> Span:
    """How many images, and how many rows of each, to take at a time within a budget of rows."""
    return (max(1, min(N, budget // rows)), rows) if budget >= rows else (1, max(1, budget))


def finish(acc: Array, y: Array, bias: Array | None, residual: Array | None, activation: str | None) -> None:
    """The epilogue: store `activation(acc + bias + residual)` to `y`; the sums may lie in `y` itself, and change.

    All are blocks seen as `N, groups, channels, rows, columns`; `bias` is `parts, groups, channels, 1, 1`, whose last
    part are the slopes, where the activation has them.
    """
    parts = [] if bias is None else list(bias)
    slopes = parts.pop() if activations.has_slopes(activation) else None
    for part in parts:
        np.add(acc, part, out=acc)
    if residual is not None:
        np.add(acc, residual, out=acc)
    if activation == "relu":
        np.maximum(acc, 0, out=acc)
    elif activation is not None:
        acc[...] = activations.applied(activation, acc, slopes)
    if acc is not y:
        y[...] = acc


def multiply(filters: Array, pixels: Array, out: Array) -> None:
    """`filters @ pixels` for every group; a depthwise layer has no sum, and no use for BLAS."""
    if filters.shape[-1] == 1:
        np.multiply(filters, pixels, out=out)
    else:
        np.matmul(filters, pixels, out=out)


class Scratch:
    """Named arrays laid out in one byte buffer, each starting on a cache line."""

    def __init__(self, **arrays: tuple[tuple[int, ...], Any]) -> None:
        self._places: dict[str, tuple[int, int, tuple[int, ...], np.dtype[Any]]] = {}
        self.nbytes = 0
        for name, (shape, dtype) in arrays.items():
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self._places[name] = self.nbytes, self.nbytes + size, shape, np.dtype(dtype)
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def carve(self, buffer: Array) -> dict[str, Array]:
        """The arrays, in the buffer."""
        return {
            name: buffer[first:last].view(dtype).reshape(shape)
            for name, (first, last, shape, dtype) in self._places.items()
        }


@functools.cache
def pools() -> ThreadpoolController:
    """The thread pools loaded so far, NumPy's BLAS among them."""
    return ThreadpoolController()


def blas_threads(threads: int) -> AbstractContextManager[object]:
    """Hold BLAS to so many threads, where it would take more."""
    blas = pools().select(user_api="blas")
    if all(pool.num_threads <= threads for pool in blas.lib_controllers):
        return nullcontext()
    limited: AbstractContextManager[object] = blas.limit(limits=threads)
    return limited


class NumpyKernel(Kernel):
    """A kernel that computes on the canonical views of its operands."""

    def __init__(self, layer: ConvLayer, device: CPU) -> None:
        self.layer = layer
        self.threads = device.threads
        self.scratch = Scratch()

    @property
    def workspace_bytes(self) -> int:  # type: ignore[override]
        """The scratch arrays."""
        return self.scratch.nbytes

    def pack(self, w: Array, packed: Array) -> None:
        with blas_threads(self.threads), np.errstate(all="ignore"):
            self.transform(filters(w, self.layer), packed)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        layer = self.layer
        first = images(a, layer)
        weights = layer.direction == "wgrad"
        second = b if self.packed_bytes else images(b, layer) if weights else filters(b, layer)
        target = filters(out, layer) if weights else images(out, layer)
        if bias is not None:
            bias = bias.reshape(layer.channel_values // layer.output_channels, layer.groups, -1, 1, 1)
        if residual is not None:
            residual = images(residual, layer)
        with blas_threads(self.threads), np.errstate(all="ignore"):
            self.compute(first, second, target, bias, residual, self.scratch.carve(workspace))

    def transform(self, w: Array, packed: Array) -> None:
        """`pack` on the canonical view; for kernels whose `packed_bytes` is not 0."""
        raise NotImplementedError(f"{type(self).__name__} uses the filters as they are")

    @abstractmethod
    def compute(
        self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, scratch: dict[str, Array]
    ) -> None:
        """`run` on canonical views; `b` is the byte buffer where filters are packed."""


class NumpyAlgorithm(Algorithm[CPU]):
    """An algorithm whose kernels cost nothing to build, so that they answer for its memory."""

    epilogue = ("fwd", "dgrad")
    activations = activations.NAMES
    kernel: ClassVar[Any]

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return self.build(layer, device, params).workspace_bytes

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return self.build(layer, device, params).packed_bytes

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        kernel: Kernel = self.kernel(layer, device, **params)
        return kernel
