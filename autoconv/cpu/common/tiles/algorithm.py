"""What the algorithms that multiply tiles declare alike, and what they ask of a device."""

from __future__ import annotations

from typing import ClassVar

from autoconv.algorithm import Candidate, Kernel, Params
from autoconv.common import split_products
from autoconv.cpu import permission
from autoconv.cpu.common.algorithm import GeneratedAlgorithm
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

# A term by three products of a float32's parts errs by up to 2**-15 of itself: 2**-16 for the product of the second
# parts, and 2**-17 for what is left of either number. In sums errors make up for each other, unless terms are few.
X3_BOUND, FEWEST_TERMS = 1.2e-5, 16


def with_few_terms(terms: int) -> list[str]:
    """Why three products are not for sums of so many terms."""
    return [] if terms >= FEWEST_TERMS else [f"terms of a sum: expected at least {FEWEST_TERMS}, got {terms}"]


class TileAlgorithm(GeneratedAlgorithm):
    """A family whose kernels use tiles."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    groupings = ("dense", "grouped")
    keeps_denormals = False  # the unit counts them as 0, in whatever mode a thread is
    products: ClassVar[dict[str, int]]  # of parts of numbers, by type
    rounds_more: ClassVar[bool] = False  # than products in the type itself, which a user may forbid

    def missing(self, device: CPU) -> list[str]:
        """Why its products cannot be computed on a device, so that there are no candidates."""
        return [] if device.matrix_unit else ["matrix_unit=None: expected a processor with a matrix unit (AMX)"]

    def all(self, layer: ConvLayer, device: CPU) -> list[Candidate]:
        return [] if self.missing(device) else super().all(layer, device)

    def why_not(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        denied = permission.refused() if device.matrix_unit == "amx" else []
        forbidden = split_products.forbidden() if self.rounds_more else []
        return (self.missing(device) or denied) + forbidden + super().why_not(layer, device, params)

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        if device.matrix_unit == "amx":
            permission.require()
        return super().build(layer, device, params)
