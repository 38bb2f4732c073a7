"""Quantised convolution by products of whole words of integers."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.int8.algorithm import Int8

ALGORITHMS: tuple[Algorithm[Any], ...] = (Int8(),)
