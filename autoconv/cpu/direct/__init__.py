"""Direct convolution on generated kernels, in every direction."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.direct.algorithm import Direct
from autoconv.cpu.direct.polyphase import DirectPolyphase

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Direct(),
    DirectPolyphase(),
)
