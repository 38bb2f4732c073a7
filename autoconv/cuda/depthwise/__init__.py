"""Depthwise convolution on a GPU."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.depthwise.depthwise import Depthwise

ALGORITHMS: tuple[Algorithm[Any], ...] = (Depthwise(),)
