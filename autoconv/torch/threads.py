"""One pool of threads for PyTorch's operators and for kernels of ours.

PyTorch's threads spin for milliseconds after each of its operators, in case of another one. With threads of our own the
next kernel would have to share processors with them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from autoconv.cpu import pool
from autoconv.errors import ConfigError


def share_threads(shared: bool = True) -> bool:
    """Run kernels on PyTorch's threads, as is done once `autoconv.torch` is imported; or on threads of our own again.

    Parameters
    ----------
    shared : bool

    Returns
    -------
    bool
        Whether they are shared from now on: not where PyTorch was built without OpenMP.

    Raises
    ------
    ConfigError
        For what is no bool.

    Examples
    --------
    >>> import autoconv.torch
    >>> autoconv.torch.share_threads(False)
    False
    >>> shared = autoconv.torch.share_threads()
    """
    if not isinstance(shared, bool):
        raise ConfigError(f"shared={shared!r}: expected True or False")
    try:
        pool.borrow(ctypes.CDLL(str(_library())) if shared else None)
    except (OSError, AttributeError, StopIteration):
        pool.borrow(None)
        return False
    return shared


def _library() -> Path:
    """PyTorch's operators, by whose dependencies its own OpenMP is found, of however many there are in the process."""
    return next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
