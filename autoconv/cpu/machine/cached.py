"""Caches of what follows from the machine's model, such as the candidates of a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_forget: list[Callable[[], None]] = []


def cached_for_model(size: int) -> Callable[[F], F]:
    """A cache of the last so many results of a function of devices, emptied by `forget_cached`.

    Parameters
    ----------
    size : int

    Returns
    -------
    callable
        A decorator.
    """

    def decorator(function: F) -> F:
        cached = functools.lru_cache(size)(function)
        _forget.append(cached.cache_clear)
        return cached  # type: ignore[return-value]  # it is called in the same way

    return decorator


def forget_cached() -> None:
    """Empty all such caches: another model is in force."""
    for forget in _forget:
        forget()
