"""How much a measurement of the machine takes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autoconv.cpu import allocator

SMALLEST = 8 << 10  # bytes of a working set
SHARE = 4  # of the memory that there is, one part for the largest working set


@dataclass(frozen=True)
class Effort:
    """How much a measurement takes.

    Attributes
    ----------
    largest : int
        Bytes of the largest working set.
    ratio : float
        From one working set to the next.
    seconds : float
        Least time of a sample.
    samples : int
        Of each quantity in each measurement; the quickest counts.
    bursts : int
        Samples of a peak, which take a tenth of a millisecond each.
    patience : float
        Seconds after which the machine is not measured again, whether or not measurements agree.
    farthest : int
        Bytes of the largest working set through which a chain is followed; to make one takes long.
    """

    largest: int
    ratio: float
    seconds: float
    samples: int
    bursts: int
    patience: float
    farthest: int

    def affordable(self) -> int:
        """Bytes of the largest working set, which shall be no more than a part of the memory that there is.

        Returns
        -------
        int
        """
        return min(self.largest, (allocator.physical_memory() or allocator.UNKNOWN) // SHARE)


FINEST = math.sqrt(2)  # from one working set to the next where caches are looked for
ROUGH = Effort(largest=64 << 20, ratio=4.0, seconds=2e-4, samples=1, bursts=40, patience=0.4, farthest=4 << 20)
THOROUGH = Effort(largest=256 << 20, ratio=FINEST, seconds=2e-3, samples=2, bursts=100, patience=8.0, farthest=64 << 20)
PEAKS_ONLY = dataclasses.replace(THOROUGH, largest=SMALLEST)  # which read no memory
