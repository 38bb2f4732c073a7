"""Winograd convolution on generated kernels, in every direction."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.cpu.winograd.compact import WinogradCompact
from autoconv.cpu.winograd.gradients import WinogradWgrad
from autoconv.cpu.winograd.matrix_unit import (
    WinogradMatrix,
    WinogradMatrixPolyphase,
    WinogradMatrixX3,
    WinogradMatrixX3Polyphase,
)
from autoconv.cpu.winograd.polyphase import WinogradPolyphase

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Winograd(),
    WinogradCompact(),
    WinogradWgrad(),
    WinogradPolyphase(),
    WinogradMatrix(),
    WinogradMatrixX3(),
    WinogradMatrixPolyphase(),
    WinogradMatrixX3Polyphase(),
)
