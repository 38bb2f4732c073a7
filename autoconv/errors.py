"""The exceptions autoconv raises on purpose; each is also the builtin a caller would expect."""

from __future__ import annotations


class AutoconvError(Exception):
    """Base class: `except AutoconvError` catches everything the library refuses."""


class LayerError(AutoconvError, ValueError):
    """A layer that is not a valid convolution: a bad extent, type, stride, padding or key."""


class ArrayError(AutoconvError, ValueError):
    """An array that does not fit the plan: wrong shape, dtype, layout, device or overlap."""


class ConfigError(AutoconvError, ValueError):
    """A network that cannot be read, run or kept: the message names file, line and layer, or node or module."""


class PlanError(AutoconvError, RuntimeError):
    """No candidate satisfies the request, or nothing is recorded and timing was not allowed."""


class DeviceLostError(PlanError):
    """A GPU that refuses everything after a fault of a kernel, until the process is started anew."""


class RecordError(AutoconvError, ValueError):
    """A tuning record, or a file of them, that cannot be used."""


class CacheWarning(UserWarning):
    """The tuning cache lost something, or cannot keep what it learns; answers are not affected."""


FAILURES = AutoconvError, OSError, MemoryError, RuntimeError  # of one layer or network, which end no others
