"""The cases of the CPU emulator, from the tests of the checkout, for the same checks on a GPU."""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from autoconv.algorithm import Algorithm, Params
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer

TESTS = Path(__file__).parents[3] / "tests"

Case = tuple[ConvLayer, Params, int]  # the last is the schedule, which only the emulator has


def _tests(name: str) -> Any:
    if not (TESTS / "simt" / "cases.py").is_file():
        raise PlanError("the cases stand in the tests of a checkout of autoconv: run the command there")
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return import_module(name)


@functools.cache
def cases(algorithm: Algorithm[Any]) -> list[Case]:
    """What the emulator runs of an algorithm.

    Raises
    ------
    PlanError
        When this is not a checkout.
    """
    return list(_tests("simt.cases").cases(algorithm))


def operands(layer: ConvLayer) -> tuple[Any, ...]:
    """The numbers that the emulator runs it on."""
    return tuple(_tests("layers").operands(layer))
