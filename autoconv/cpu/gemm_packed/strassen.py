"""1x1 convolution by Strassen's algorithm: seven products of sums of parts of packed operands in place of eight.

The pixels of a plane, the channels and the filters are halved. What Strassen multiplies are sums and differences of
these parts: those of the filters are packed once; those of the pixels are made as a panel is copied, tile by tile, so
that they are written where plain pixels would be. Each of the seven products runs as `gemm.packed`'s do, in registers,
and is added to one or two of the four blocks of outputs from there, in the cache: no sum of parts goes to memory.
"""

from __future__ import annotations

from autoconv.algorithm import Params
from autoconv.cpu.device import CPU
from autoconv.cpu.gemm_packed.algorithm import GemmPacked
from autoconv.cpu.gemm_packed.geometry import pixels_of, product, spreads
from autoconv.cpu.gemm_packed.strassen_kernels import emit
from autoconv.layer import ConvLayer


class GemmStrassen(GemmPacked):
    """`gemm.packed` on halves of pixels, channels and filters: 7/8 of its multiplications, 7/4 of its packed operands.

    One level: a second one would multiply 49/64, but copy and add up so much more that it was slower.

    Source: Strassen, "Gaussian elimination is not optimal" (1969), doi:10.1007/BF02165411; the sums inside the packing
    and the register tile's store: Huang, Smith, Henry and van de Geijn, "Strassen's algorithm reloaded" (2016),
    doi:10.1109/SC.2016.58. Its error grows: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), 23.2.2.
    """

    name = "gemm.strassen"
    exact = False
    spreads_nonfinite = True  # to the other half of the plane, and to other filters
    float32_bound = 4e-6
    emitter = staticmethod(emit)
    halved = True

    def unsupported(self, layer: ConvLayer) -> list[str]:
        if reasons := super().unsupported(layer):
            return reasons
        if spreads(product(layer)):
            reasons.append(f"stride={layer.stride}: expected 1x1 of a gradient, whose zeros are not written")
        return reasons

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        if not self.candidates(layer, device):
            p = product(layer)
            halves = f"{pixels_of(p)} pixels, {p.C} channels and {p.K} filters"
            return [f"halves: expected less to multiply by seven products of them, got {halves}"]
        return super().refusals(layer, device, params)
