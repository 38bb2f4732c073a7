"""The code on which what is measured of networks depends."""

from __future__ import annotations

from autoconv import registry
from autoconv.common import code_hash
from autoconv.cpu.device import CPU
from autoconv.device import Device


def code_of_networks(device: Device) -> str:
    """What changes with any kernel of ours that computes a network: of layers, of several in one, or between them.

    Parameters
    ----------
    device : Device

    Returns
    -------
    str
    """
    rooms = ("operators.elementwise", "fused.kernels") if isinstance(device, CPU) else ("operators.elementwise",)
    beside = (code_hash.version(f"autoconv.{device.kind}.{module}") for module in rooms)
    return " ".join([registry.code_of(registry.algorithms(device)), *beside])
