"""Explicit GEMM: im2col, and the matrix product of CuPy's cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Array, Kernel, Params
from autoconv.cuda.algorithm import CudaAlgorithm, Launch, ceil_div, roofline
from autoconv.cuda.source import Unit
from autoconv.device import Device
from autoconv.layer import ConvLayer

THREADS = 256


class Explicit(CudaAlgorithm):
    """The lowered matrix of IMAGES images at a time in the workspace, then one batched product.

    Chellapilla, Puri & Simard, "High Performance Convolutional Neural Networks for Document
    Processing" (2006). A filter of one tap on unpadded input needs no lowering at all.
    """

    name = "gemm.explicit"
    files = ("explicit.cu",)
    dtypes = ("float32", "float64")  # CuPy's batched product takes narrower types by way of copies

    def candidates(self, layer: ConvLayer, device: Device) -> Iterable[Params]:
        divisors = [n for n in range(1, layer.N + 1) if layer.N % n == 0]
        some = {divisors[0], divisors[len(divisors) // 2], divisors[-1]}
        return [{"IMAGES": images} for images in sorted(some)]

    def refusals(self, layer: ConvLayer, params: Params) -> list[str]:
        reasons = []
        if layer.direction != "fwd":
            reasons.append(f"{layer.direction}: this one has fwd")
        if layer.layout == "NHWC" and layer.groups > 1:
            reasons.append("groups in NHWC: their channels are not neighbours from pixel to pixel")
        images = int(params["IMAGES"])
        if images < 1 or layer.N % images:
            reasons.append(f"IMAGES={images}: it must divide N={layer.N}")
        return reasons

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """The lowering of some images, where it is needed; the tail of all, where there is one."""
        some = _some(layer, params)
        units = []
        if not _flat(layer):
            values = some.N * layer.P * layer.Q * layer.C * layer.R * layer.S
            units.append(Unit("im2col", self.files, some, (ceil_div(values, THREADS), 1, 1), THREADS, 4))
        if layer.bias or layer.residual or layer.activation:
            blocks = ceil_div(math.prod(layer.output_shape), THREADS)
            units.append(Unit("tail", self.files, layer, (blocks, 1, 1), THREADS, 4))
        return tuple(units)

    def workspace_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        places = int(params["IMAGES"]) * layer.P * layer.Q
        return 0 if _flat(layer) else places * layer.C * layer.R * layer.S * layer.itemsize

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        times = layer.N // int(params["IMAGES"])
        lowered = 2 * times * self.workspace_bytes(layer, device, params) / device.bandwidth()
        return roofline(layer, device, efficiency=0.7, launches=2 * times) + lowered

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        units = self.units(layer, params)
        launches = dict(zip((unit.function for unit in units), self.load(device, units), strict=True))
        workspace = self.workspace_bytes(layer, device, params)
        return Lowered(device, layer, int(params["IMAGES"]), workspace, launches)


class Lowered(Kernel):
    """Lowering and product, some images at a time."""

    def __init__(
        self, device: Device, layer: ConvLayer, images: int, workspace_bytes: int, launches: dict[str, Launch]
    ) -> None:
        self._matmul = device.xp.matmul
        self._layer, self._images = layer, images
        self._lower, self._tail = launches.get("im2col"), launches.get("tail")
        self.workspace_bytes = workspace_bytes

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        layer, images, G = self._layer, self._images, self._layer.groups
        depth, places = layer.C // G * layer.R * layer.S, layer.P * layer.Q
        filters = b.reshape(G, layer.K // G, depth)
        for n in range(0, layer.N, images):
            x, y = a[n : n + images], out[n : n + images]
            if self._lower is None:
                columns = x
            else:
                columns = workspace[: self.workspace_bytes].view(layer.numpy_dtype)
                self._lower(x, columns)
            if layer.layout == "NCHW":
                lowered = columns.reshape(images, G, depth, places)
                self._matmul(filters, lowered, out=y.reshape(images, G, layer.K // G, places))
            else:
                lowered = columns.reshape(images * places, depth)
                self._matmul(lowered, filters[0].T, out=y.reshape(images * places, layer.K))
        if self._tail is not None:
            self._tail(out, bias, residual)


def _some(layer: ConvLayer, params: Params) -> ConvLayer:
    return layer.replace(N=int(params["IMAGES"]), bias=False, residual=False, activation=None)


def _flat(layer: ConvLayer) -> bool:
    """Whether the input itself is the lowered matrix."""
    return layer.R * layer.S == 1 and layer.stride == (1, 1) and not any(map(any, layer.padding))
