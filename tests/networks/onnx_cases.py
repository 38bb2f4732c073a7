"""The cases that the onnx package tests single operators with."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any


@functools.cache
def cases_of(module: str) -> list[Any]:
    """The cases of a module of `onnx.backend.test.case.node`, which adds them to one list when it is first imported.

    So nobody else may import one: what had been imported before would be missing.
    """
    from onnx.backend.test.case import node

    before = len(node._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.{module}")
    return list(node._NodeTestCases[before:])
