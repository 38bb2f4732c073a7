"""Depthwise convolution on generated kernels, in every direction."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.depthwise.algorithm import Depthwise
from autoconv.cpu.depthwise.flat import DepthwiseFlat
from autoconv.cpu.depthwise.gradients import DepthwiseWgrad
from autoconv.cpu.depthwise.inplace import DepthwiseInPlace

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Depthwise(),
    DepthwiseInPlace(),
    DepthwiseFlat(),
    DepthwiseWgrad(),
    Polyphase(Depthwise(), layouts=("NCHW",), groupings=("depthwise",)),
)
