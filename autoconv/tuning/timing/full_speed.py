"""Waiting until a device computes at its full speed: the processors of a virtual machine do not always.

For moments, or for seconds, two of them may share one core, or one may stand still, of which the machine's own clocks
tell nothing. What computes most loses most then, so that a race is no longer between contestants alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoconv.tuning.timing.race import wait_until_idle

if TYPE_CHECKING:
    from autoconv.device import Device

SLOW = 1.2  # times as long as at best
PAUSE = 0.05  # seconds between looks at a slow device, and at a quick one
PATIENCE = 30.0  # seconds in one comparison for waiting, and for samples that are taken again
RESIGNED = 120.0  # seconds for which a device is not waited for any more, once that was in vain

_vain: dict[str, float] = {}  # until when devices are not waited for, by key

Sampler = Callable[[], float]


@dataclass
class FullSpeed:
    """Takes samples while a device is at its full speed.

    Attributes
    ----------
    pace : callable
        As `Device.pace`.
    patience : float
        Seconds that are left for waiting.
    slow : int
        Samples that were kept although the device was slow, as no patience was left.
    key : str
        Of the device: where patience ends while it is slow, nobody else waits for it for a while.
    clock, sleep, busy : callable
        As for a race.
    """

    pace: Callable[[], float]
    patience: float
    slow: int = 0
    key: str = ""
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    busy: Callable[[], float] = time.process_time
    _next: float = 0.0  # when to look again

    @classmethod
    def of(cls, device: Device, patience: float = PATIENCE) -> FullSpeed:
        """A device's, with so many seconds to wait; none shortly after somebody has waited for it in vain."""
        resigned = time.perf_counter() < _vain.get(device.key, 0.0)
        return cls(device.pace, 0.0 if resigned else patience, key=device.key)

    def wait(self) -> float:
        """Wait until the device is at full speed, or patience ends; it is looked at only now and then.

        Returns
        -------
        float
            Seconds that this took.
        """
        start = self.clock()
        if self.patience <= 0 or start < self._next:
            return 0.0
        if self._slow():
            begun = self.clock()
            while self.clock() - begun < self.patience:
                self.sleep(PAUSE)
                if not self._slow():
                    break
            else:
                _vain[self.key] = self.clock() + RESIGNED
            self.patience -= self.clock() - begun
        now = self.clock()
        self._next = now + PAUSE
        return now - start

    def take(self, sampler: Sampler) -> float:
        """A sample before and after which the device was at full speed, unless patience ends first.

        Parameters
        ----------
        sampler : callable
            Takes a sample, and gives its seconds.

        Returns
        -------
        float
            Seconds.
        """
        while True:
            self._next = 0.0
            self.wait()
            start = self.clock()
            seconds = sampler()
            if not self._slow():
                return seconds
            self.patience -= self.clock() - start
            if self.patience <= 0:
                self.slow += 1
                return seconds

    def _slow(self) -> bool:
        """Whether it is, once nobody's threads spin any more."""
        if self.pace() <= SLOW:
            return False
        wait_until_idle(self.sleep, self.busy)
        return self.pace() > SLOW


def slowness(samples: int) -> str:
    """What is said of figures some of whose samples were taken although the device was slow."""
    return f"threads were not at their full speed in {samples} samples"
