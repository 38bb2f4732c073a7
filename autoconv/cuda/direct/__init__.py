"""Direct convolution on a GPU."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.direct.chwn import DirectCHWN
from autoconv.cuda.direct.direct import Direct
from autoconv.cuda.direct.tiled import DirectTiled

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Direct(),
    DirectTiled(),
    DirectCHWN(),
)
