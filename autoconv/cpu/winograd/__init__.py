"""Winograd convolution on generated kernels, in every direction."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.cpu.winograd.compact import WinogradCompact
from autoconv.cpu.winograd.gradients import WinogradWgrad
from autoconv.cpu.winograd.matrix_unit import WinogradMatrix, WinogradMatrixX3

ALGORITHMS: tuple[Algorithm[Any], ...] = (
    Winograd(),
    WinogradCompact(),
    WinogradWgrad(),
    Polyphase(Winograd()),
    WinogradMatrix(),
    WinogradMatrixX3(),
    Polyphase(WinogradMatrix()),
    Polyphase(WinogradMatrixX3()),
)
