"""`PackedWeights`: filters as one kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoconv.algorithm import Array
    from autoconv.common.candidate import Candidate
    from autoconv.device import Device
    from autoconv.layer import ConvLayer
    from autoconv.records.limits import Denormals


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Filters transformed once, for one layer and candidate; `Plan.run` takes them in place of `w`.

    Made by `Plan.pack`.

    Parameters
    ----------
    binding : tuple of ConvLayer, Candidate, Device, and "flush" or "keep"
        Where alone they can be used, and what became of denormals among them.
    buffer : array
        The transformed filters, as the candidate's kernel reads them, on the device.
    """

    binding: tuple[ConvLayer, Candidate, Device, Denormals]
    buffer: Array

    @property
    def nbytes(self) -> int:
        """Bytes of the transformed filters."""
        return int(self.buffer.nbytes)
