"""1x1 convolution as a matrix product of packed operands, for channels in planes.

Lanes are output channels and pixels are broadcast, as in `direct`; but a plane is cut into tiles of a few pixels,
and every tile's pixels are copied next to one another, channel after channel: one line of the cache then holds
several channels of a tile where in place it holds a part of one, and a task's tiles are read from the L2 cache in
order, by every block of filters.

The gradient of the input of a layer with strides is such a product too, with zeros between its pixels: what a block of
filters makes of a panel is gathered first, and then spread over the rows of the image, each written in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoconv.algorithm import Params
from autoconv.cpu.codegen import compiler
from autoconv.cpu.common.algorithm import CALL, GeneratedAlgorithm
from autoconv.cpu.common.packing import packed_size
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.geometry import blocking_of, grid_of, product, rounded, thread_bytes
from autoconv.cpu.gemm_packed.kernels import emit
from autoconv.layer import ConvLayer

MOST_STRIDE = 8  # of a gradient: the zeros after a pixel are written out


class GemmPacked(GeneratedAlgorithm):
    """Register tiles of `TK` channels by `TQ` pixels, from packed filters and `panels` packed panels of pixels.

    `BC` channels of the sum at a time.

    Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
    doi:10.1145/1356052.1356053: the packing of both operands, with a panel of pixels in the L2 cache and a block of
    filters in the L1 cache.
    """

    name = "gemm.packed"
    directions = ("fwd", "dgrad")
    layouts = ("NCHW",)
    groupings = ("dense", "grouped")
    exact = True

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return grid_of(layer, device)

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if (layer.R, layer.S) != (1, 1):
            reasons.append(f"R={layer.R}, S={layer.S}: expected 1x1 filters")
        if layer.padding != ((0, 0), (0, 0)):
            reasons.append(f"padding={layer.padding}: expected none, as pixels of the border would not be copied")
        if layer.direction == "dgrad" and max(layer.stride) > MOST_STRIDE:
            stride = f"{layer.stride[0]}x{layer.stride[1]}"
            reasons.append(f"dgrad: expected strides up to {MOST_STRIDE}, whose zeros are written out, got {stride}")
        return reasons

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        reasons = []
        if params not in (grid := grid_of(layer, device)):
            for name in ("TK", "TQ", "BC", "panels"):
                allowed = sorted({cut[name] for cut in grid})
                if params[name] not in allowed:
                    reasons.append(f"{name}={params[name]}: expected {' or '.join(map(str, allowed))}")
            given = ",".join(f"{name}={value}" for name, value in params.items())
            reasons = reasons or [f"{given}: expected sums that fill the registers and a task's buffer, and no more"]
        return reasons

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        blocking = blocking_of(layer, device, params)
        return device.threads * thread_bytes(product(layer), blocking, layer.accumulator.itemsize)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        return packed_size(product(layer), int(params["TK"])) * layer.accumulator.itemsize

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        """At peak, but for empty lanes, and what a tile's sums and a pixel's copies cost, which many channels share."""
        problem = product(layer)
        shares = (1.05 + 16 / problem.C) * rounded(problem.K, int(params["TK"])) / problem.K + 8 / problem.K
        return max(shares * layer.flops / device.peak_flops(layer.dtype), layer.bytes / device.bandwidth()) + CALL

    def program(self, layer: ConvLayer, device: CPU, params: Params) -> compiler.Program:
        return compiler.build(emit, device.instruction_set, layer, blocking_of(layer, device, params))
