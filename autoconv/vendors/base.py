"""What the adapters of other libraries share.

No library is imported before a plan builds one of its candidates. PyTorch (oneDNN) and ONNX Runtime (MLAS) only add
the products in another order: over the layers of the tests their errors stay below 2e-7 in float32. So the cap is
that of a direct sum, and a release that took to Winograd would be refused by verification, not silently be less
accurate. What a library allocates inside is not known, and not part of `workspace_bytes`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from autoconv.algorithm import Algorithm, Params

if TYPE_CHECKING:
    from autoconv.device import Device
    from autoconv.layer import ConvLayer


@functools.cache
def installed(package: str) -> bool:
    """Whether a package could be imported; nothing is."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def release(package: str) -> str:
    """The version of a package that is not imported for it, or "absent"."""
    from importlib import metadata  # rarely needed, and slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # or it comes under another name, as onnxruntime-gpu
        names = metadata.packages_distributions().get(package, []) if installed(package) else []
        return metadata.version(names[0]) if names else "absent"


class Vendor(Algorithm[Any]):
    """A library's convolution as an algorithm.

    Attributes
    ----------
    packages : tuple of str
        What has to be installed; the first is the library, whose release is the algorithm's version.
    call : float
        Seconds of a call that computes next to nothing.
    """

    packages: ClassVar[tuple[str, ...]]
    call: ClassVar[float]

    @property
    def version(self) -> str:
        return release(self.packages[0])

    def installed(self) -> bool:
        return all(map(installed, self.packages))

    def refusals(self, layer: ConvLayer, device: Device, params: Params) -> list[str]:
        return [f"{package} is not installed" for package in self.packages if not installed(package)]

    def packed_bytes(self, layer: ConvLayer, device: Device, params: Params) -> int:
        return math.prod(layer.w_shape) * layer.itemsize if self.packs(layer, params) else 0

    @abstractmethod
    def packs(self, layer: ConvLayer, params: Params) -> bool:
        """Whether these parameters take the filters in another form."""

    def estimate(self, layer: ConvLayer, device: Device, params: Params) -> float:
        return self.call + layer.flops / device.peak_flops(layer.dtype) + layer.bytes / device.bandwidth()
