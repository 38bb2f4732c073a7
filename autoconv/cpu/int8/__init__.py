"""Quantised convolution by products of whole words of integers."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.int8.algorithm import Int8
from autoconv.cpu.int8.depthwise import Int8Depthwise

ALGORITHMS: tuple[Algorithm[Any], ...] = (Int8(), Int8Depthwise())
