"""Depthwise convolution on generated kernels, in every direction."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.depthwise.algorithm import Depthwise
from autoconv.cpu.depthwise.flat import DepthwiseFlat
from autoconv.cpu.depthwise.gradients import DepthwiseWgrad
from autoconv.cpu.depthwise.inplace import DepthwiseInPlace
from autoconv.cpu.depthwise.polyphase import DepthwisePolyphase

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Depthwise(),
    DepthwiseInPlace(),
    DepthwiseFlat(),
    DepthwiseWgrad(),
    DepthwisePolyphase(),
)
