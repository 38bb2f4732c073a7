"""Products of NHWC whose output is left in NCHW: for `gemm.hopper.staged`, which then copies one array less."""

from __future__ import annotations

from autoconv.cuda.hopper.hopper import Hopper
from autoconv.cuda.hopper.split import HopperBF16x6


class HopperTurned(Hopper):
    """`gemm.hopper` of a single pass; four lanes exchange what they have, so that each has neighbours in a row."""

    name = "gemm.hopper.turned"
    turned = True


class HopperBF16x6Turned(HopperBF16x6):
    """`gemm.hopper.bf16x6` likewise."""

    name = "gemm.hopper.bf16x6.turned"
    turned = True
