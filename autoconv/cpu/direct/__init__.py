"""Direct convolution on generated kernels, in every direction."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.direct.algorithm import Direct

ALGORITHMS: tuple[Algorithm[Any], ...] = (Direct(), Polyphase(Direct()))
