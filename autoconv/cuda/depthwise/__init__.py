"""Depthwise convolution on a GPU."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.depthwise.depthwise import Depthwise
from autoconv.cuda.depthwise.wgrad import DepthwiseWgrad

ALGORITHMS: tuple[Algorithm[Any], ...] = (Depthwise(), DepthwiseWgrad())
