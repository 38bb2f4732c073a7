"""Devices and algorithms by name: the one place that knows every family."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from autoconv.algorithm import Algorithm
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import PlanError


@functools.singledispatch
def algorithms(device: Device) -> tuple[Algorithm[Any], ...]:
    """Every algorithm of a device, in the order of its kind's table of contents; other libraries' come last.

    A device that has others (one made for a test, say) registers a function of its own for its class.
    """
    return _table(device.kind)


def by_name(device: Device) -> dict[str, Algorithm[Any]]:
    """The same, by their names."""
    return {algorithm.name: algorithm for algorithm in algorithms(device)}


def own(device: Device) -> list[Algorithm[Any]]:
    """Those of a device's algorithms that are ours, and no other library's."""
    return [algorithm for algorithm in algorithms(device) if algorithm.vendor is None]


def code_of(algorithms: Iterable[Algorithm[Any]]) -> str:
    """What changes with any kernel of ours among some algorithms."""
    versions = "".join(f"{one.name} {one.version}\n" for one in algorithms if one.vendor is None)
    return hashlib.sha256(versions.encode()).hexdigest()[:12]


def fused_activations(device: Device) -> frozenset[str]:
    """The names of the activations that kernels of a device apply to any layer while they store."""
    return frozenset(name for one in algorithms(device) if one.takes_all for name in one.activations)


@functools.cache
def _table(kind: str) -> tuple[Algorithm[Any], ...]:
    """What the families named in the table of contents offer: `FAMILIES` of the package, `ALGORITHMS` of a family."""
    found: list[Algorithm[Any]] = []
    for family in import_module(f"autoconv.{kind}").FAMILIES:
        found += import_module(f"autoconv.{kind}.{family}").ALGORITHMS
    vendors: dict[str, tuple[Algorithm[Any], ...]] = import_module("autoconv.vendors").ALGORITHMS
    return (*found, *vendors.get(kind, ()))


def this_device() -> Device:
    """The device that is meant where none is named: this machine's processor."""
    return _this_cpu(os.environ.get("AUTOCONV_NUM_THREADS"), os.environ.get("AUTOCONV_ISA"))


@functools.cache
def _this_cpu(threads: str | None, instruction_set: str | None) -> CPU:
    del threads, instruction_set  # read by `current`; here they are what the memory is keyed by
    return CPU.current()


def resolve(device: Any) -> Device:
    """The device that a caller means.

    Parameters
    ----------
    device : Device, str, cupy.cuda.Device or None
        "cpu", "cuda" (CuPy's current GPU) or "cuda:1" (by its number among those CuPy sees).

    Raises
    ------
    PlanError
        For anything else, and for a GPU that is not there; the message says what is missing.
    """
    if isinstance(device, Device):
        return device
    if device is None or device == "cpu":
        return this_device()
    from autoconv.cuda.device import CUDA

    if isinstance(device, str):
        found = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
        if found is not None:
            return CUDA.current() if found[1] is None else CUDA.numbered(int(found[1]))
    elif type(device).__module__.startswith("cupy"):
        return CUDA.numbered(int(device))
    raise PlanError(f"device={device!r}: expected a Device, 'cpu', 'cuda' or 'cuda:N'")


def device_of(array: Any) -> Device:
    """The device on which an array lies: one of NumPy's, CuPy's, or of another library that speaks DLPack."""
    if type(array) is np.ndarray:
        return this_device()
    from autoconv.cuda.device import CUDA, DLPACK_CUDA

    if type(array).__module__.startswith("cupy"):
        return CUDA.numbered(int(array.device))
    if hasattr(array, "__dlpack_device__"):
        try:
            kind, index = array.__dlpack_device__()
        except (BufferError, RuntimeError, TypeError, ValueError):  # nowhere, as PyTorch's "meta": refused when read
            return this_device()
        if int(kind) == DLPACK_CUDA:
            return CUDA.numbered(int(index))
    return this_device()
