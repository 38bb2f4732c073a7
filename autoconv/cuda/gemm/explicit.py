"""Explicit GEMM: lowering by kernels of our own, matrix products by cuBLAS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autoconv.algorithm import Array, Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import CudaAlgorithm, Launch, aligned, ceil_div
from autoconv.cuda.common.model import Demand, beyond_cache, library_product, streaming
from autoconv.cuda.libraries.cublas_cufft import LibraryError, Matrices, Multiply, product
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

THREADS = 256


class Explicit(CudaAlgorithm):
    """The lowered matrix of IMAGES images at a time in the workspace; MERGED into one, or one to an image.

    Chellapilla, Puri & Simard, "High Performance Convolutional Neural Networks for Document
    Processing" (2006). A filter of one tap on unpadded input needs no lowering. The gradient of the input is gathered
    from the columns, not scattered, so that sums have an order.
    """

    name = "gemm.explicit"
    exact = True
    files = ("gemm/explicit.cu",)

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        divisors = [n for n in range(1, layer.N + 1) if layer.N % n == 0]
        for images in sorted({divisors[0], divisors[len(divisors) // 2], divisors[-1]}):
            for merged in (0, 1) if layer.layout == "NCHW" and images > 1 else (1,):
                yield {"IMAGES": images, "MERGED": merged}

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = []
        images, merged = int(params["IMAGES"]), params["MERGED"]
        if images < 1 or layer.N % images:
            reasons.append(f"IMAGES={images}: expected a divisor of N={layer.N}")
        if merged not in (0, 1) or (layer.layout == "NHWC" and not merged):
            reasons.append(f"MERGED={merged}: expected 0 or 1, and 1 in NHWC, where images are merged anyway")
        if images * layer.P * layer.Q >= 2**31 or layer.C * layer.R * layer.S >= 2**31:
            reasons.append("rows and columns of a matrix: expected fewer than 2**31")
        return reasons

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        reasons = super().refusals(layer, device, params)
        if not reasons:
            try:
                device.blas()
            except LibraryError as error:
                reasons.append(str(error))
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """For so many images: what is done before the product, and after it."""
        some = _some(layer, params)
        values = {
            "im2col": some.N * layer.P * layer.Q * layer.C * layer.R * layer.S,
            "merge": math.prod(some.y_shape),
            "epilogue": math.prod(some.y_shape),
            "col2im": math.prod(some.x_shape),
            "narrow": math.prod(some.w_shape),
        }
        constants = (("MERGED", int(params["MERGED"])),)
        return tuple(
            Unit(name, *self.files, some, (ceil_div(values[name], THREADS), 1, 1), THREADS, 4, constants=constants)
            for name in _kernels(layer, params)
        )

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return sum(_parts(layer, params)) + aligned(device.blas().workspace_bytes)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        X, Y, W = _parts(layer, params)
        times = layer.N // int(params["IMAGES"])
        images = math.prod(layer.x_shape) * layer.itemsize / times
        moved = {
            "im2col": images + X,
            "merge": 2.0 * Y,
            "epilogue": 2.0 * Y,
            "col2im": images + X,
            "narrow": 1.5 * W,
        }
        some = [streaming(unit, moved[unit.function]) for unit in self.units(layer, params)]
        rows, columns, depth = _extents(layer, params)
        calls = list(_calls(layer, params))
        once = (layer.bytes / times + beyond_cache(device, X + Y + W)) / len(calls)
        size = layer.itemsize
        pitch = size * math.gcd(*(max(one.row, one.column) for one in _matrices(layer, params, (0, 0, 0))))
        products = [library_product(rows, columns, depth, call.batch, size, pitch=pitch) for call in calls]
        return [*some, *(replace(product, memory=once) for product in products)] * times

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        launches = dict(zip(_kernels(layer, params), self.load(device, self.units(layer, params)), strict=True))
        return Lowered(device, layer, params, launches)


class Call(NamedTuple):
    """One call of the library: a batch of products, and where they begin, in elements of W, X and Y."""

    batch: int
    steps: tuple[int, int, int]
    starts: tuple[int, int, int]
    adds: bool


class Lowered(Kernel):
    """Lowering and product, some images at a time."""

    def __init__(self, device: CUDA, layer: ConvLayer, params: Params, launches: dict[str, Launch]) -> None:
        self._layer, self._images, self._address = layer, int(params["IMAGES"]), device.address
        self._launches = launches
        self._parts = (*_parts(layer, params), aligned(device.blas().workspace_bytes))
        self.workspace_bytes = sum(self._parts)
        self._products = [(call, _product(device, layer, params, call)) for call in _calls(layer, params)]
        wide = layer.accumulator.itemsize
        self._sizes = [layer.itemsize] * 3
        if layer.direction == "dgrad" and "col2im" in launches:
            self._sizes[1] = wide
        if layer.direction == "fwd" and self._parts[1]:
            self._sizes[2] = wide
        if "narrow" in launches:
            self._sizes[0] = wide

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        x, w, y = {"fwd": (a, b, out), "dgrad": (out, b, a), "wgrad": (a, out, b)}[self._layer.direction]
        images, launches = self._images, self._launches
        ends = list(itertools.accumulate(self._parts))
        columns, matrix, sums, scratch = (workspace[i:j] for i, j in zip((0, *ends), ends, strict=False))
        for n in range(0, self._layer.N, images):
            some_x, some_y = x[n : n + images], y[n : n + images]
            X = columns if self._parts[0] else some_x
            Y = matrix if self._parts[1] else some_y
            W = sums if self._parts[2] else w
            if "im2col" in launches:
                launches["im2col"](some_x, X)
            if "merge" in launches:
                launches["merge"](some_y, Y)
            self._multiply(W, X, Y, scratch, add=n > 0 and self._layer.direction == "wgrad")
            if "col2im" in launches:
                launches["col2im"](X, some_x)
            if "epilogue" in launches:
                launches["epilogue"](Y, some_y, bias, None if residual is None else residual[n : n + images])
        if "narrow" in launches:
            launches["narrow"](sums, w)

    def _multiply(self, W: Array, X: Array, Y: Array, scratch: Array, add: bool) -> None:
        bases = [self._address(array) for array in (W, X, Y)]
        first, second, third = {"fwd": (0, 1, 2), "dgrad": (0, 2, 1), "wgrad": (2, 1, 0)}[self._layer.direction]
        for call, multiply in self._products:
            at = [b + s * size for b, s, size in zip(bases, call.starts, self._sizes, strict=True)]
            multiply(at[first], at[second], at[third], self._address(scratch), add or call.adds)


def _some(layer: ConvLayer, params: Params) -> ConvLayer:
    return layer.replace(N=int(params["IMAGES"]))


def _reordered(layer: ConvLayer, params: Params) -> bool:
    """Whether the images of y are not merged in memory as they are in the product."""
    return layer.layout == "NCHW" and bool(params["MERGED"]) and int(params["IMAGES"]) > 1


def _flat(layer: ConvLayer, params: Params) -> bool:
    """Whether the input itself is the lowered matrix."""
    one = layer.R * layer.S == 1 and layer.stride == (1, 1) and not any(map(any, layer.padding))
    return one and not _reordered(layer, params)


def _staged(layer: ConvLayer, params: Params) -> bool:
    """Whether sums go to the workspace before the epilogue rounds them: once, and in the order of y."""
    return _reordered(layer, params) or (layer.itemsize == 2 and layer.has_epilogue)


def _kernels(layer: ConvLayer, params: Params) -> tuple[str, ...]:
    """The names of those needed."""
    lowered, reordered = not _flat(layer, params), _reordered(layer, params)
    wanted = {
        "fwd": {"im2col": lowered, "epilogue": layer.has_epilogue or reordered},
        "dgrad": {"merge": reordered, "col2im": lowered},
        "wgrad": {"im2col": lowered, "merge": reordered, "narrow": _summed_wide(layer, params)},
    }[layer.direction]
    return tuple(name for name, needed in wanted.items() if needed)


def _summed_wide(layer: ConvLayer, params: Params) -> bool:
    """Whether several products add to a gradient that is narrower than its sums should be."""
    several = int(params["IMAGES"]) < layer.N or len(list(_calls(layer, params))) > 1
    return layer.direction == "wgrad" and layer.itemsize == 2 and several


def _parts(layer: ConvLayer, params: Params) -> tuple[int, int, int]:
    """Bytes of the workspace: columns X, the matrix Y where it is not y, sums W where they are not dw."""
    images, wide = int(params["IMAGES"]), layer.accumulator.itemsize
    places, size = images * layer.P * layer.Q, layer.itemsize
    fwd, dgrad = layer.direction == "fwd", layer.direction == "dgrad"
    X = 0 if _flat(layer, params) else places * layer.C * layer.R * layer.S * (wide if dgrad else size)
    staged = _staged(layer, params) if fwd else _reordered(layer, params)
    Y = places * layer.K * (wide if fwd else size) if staged else 0
    W = math.prod(layer.w_shape) * wide if _summed_wide(layer, params) else 0
    return aligned(X), aligned(Y), aligned(W)


def _group_steps(layer: ConvLayer, params: Params) -> tuple[int, int, int]:
    """From group to group in W, X and Y."""
    filters, taps = layer.K // layer.groups, layer.C // layer.groups * layer.R * layer.S
    places = _places(layer, params)
    if layer.layout == "NCHW":
        return filters * taps, taps * places, filters * places
    return filters * taps, taps if _flat(layer, params) else taps * places, filters


def _places(layer: ConvLayer, params: Params) -> int:
    """Columns of one product."""
    return layer.P * layer.Q * (int(params["IMAGES"]) if params["MERGED"] else 1)


def _calls(layer: ConvLayer, params: Params) -> Iterator[Call]:
    """One for all groups, if images are merged; else the shorter of a loop over images and one over groups."""
    groups, images = layer.groups, int(params["IMAGES"])
    group = _group_steps(layer, params)
    if params["MERGED"] or images == 1:
        yield Call(groups, group, (0, 0, 0), False)
        return
    W, X, Y = group
    image = 0, X * groups, Y * groups
    if layer.direction == "wgrad" or images < groups:
        for n in range(images):
            yield Call(groups, group, (0, n * image[1], n * image[2]), layer.direction == "wgrad" and n > 0)
    else:
        for g in range(groups):
            yield Call(images, image, (g * W, g * X, g * Y), False)


def _extents(layer: ConvLayer, params: Params) -> tuple[int, int, int]:
    """Rows, columns and depth of one group's product."""
    filters, taps = layer.K // layer.groups, layer.C // layer.groups * layer.R * layer.S
    places = _places(layer, params)
    return {"fwd": (filters, places, taps), "dgrad": (taps, places, filters), "wgrad": (filters, taps, places)}[
        layer.direction
    ]


def _matrices(layer: ConvLayer, params: Params, steps: tuple[int, int, int]) -> tuple[Matrices, Matrices, Matrices]:
    """W, X and Y, as they lie in memory."""
    taps, places = layer.C // layer.groups * layer.R * layer.S, _places(layer, params)
    W = Matrices(taps, 1, steps[0])
    if layer.layout == "NCHW":
        return W, Matrices(places, 1, steps[1]), Matrices(places, 1, steps[2])
    X = Matrices(1, layer.C if _flat(layer, params) else taps, steps[1])
    return W, X, Matrices(1, layer.K, steps[2])


def _product(device: CUDA, layer: ConvLayer, params: Params, call: Call) -> Multiply:
    """Y = W X, X = W^T Y or W = Y X^T."""
    W, X, Y = _matrices(layer, params, call.steps)
    operands = {"fwd": (W, X, Y), "dgrad": (W.transposed, Y, X), "wgrad": (Y, X.transposed, W)}[layer.direction]
    wide = {
        "fwd": _staged(layer, params),
        "dgrad": not _flat(layer, params),
        "wgrad": _summed_wide(layer, params),
    }[layer.direction]
    dtypes = layer.dtype, layer.accumulator.name if wide else layer.dtype
    return product(device.blas(), dtypes, _extents(layer, params), call.batch, *operands)
