"""Tensor maps: how Hopper's copy engine (TMA) sees an array (CUDA driver API, "Tensor Map Object Management").

One description serves the driver, which encodes it, and the tests' emulator, which reads it as it stands.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoconv.errors import AutoconvError

BYTES = 128  # of an encoded map
LINE = 128  # bytes of a line in shared memory: the innermost extent of every box, for the 128-byte swizzle
STRIDE_UNIT = 16  # bytes
MOST = {"stride": 2**40, "extent": 2**32, "box": 256, "pixels": 1024, "step": 8}
CORNERS = (-128, 127)  # of the box of first pixels, for two spatial dimensions
OFFSETS = (0, 255)  # of a filter tap, likewise

# CUtensorMapDataType. 16-bit values travel as integers, untouched; float32 is rounded to tf32 on its way.
TYPES = {"float16": 1, "bfloat16": 1, "float32": 11}
INTERLEAVE_NONE, SWIZZLE_128B, PROMOTE_L2_128B, FILL_ZEROS = 0, 3, 2, 0


class TensorMapError(AutoconvError, RuntimeError):
    """A tensor map that the driver refuses, or no driver that knows them."""


@dataclass(frozen=True)
class TensorMap:
    """An array of up to four dimensions, innermost first, and the box of it that one copy brings.

    Attributes
    ----------
    dtype : str
    extents : int
        Elements in each dimension.
    strides : int
        Bytes from one to the next, of every dimension but the innermost.
    box : int
        Elements of a copy in each dimension; for im2col, channels and pixels.
    steps : int
        Distance of neighbouring pixels of an im2col copy, (width, height). Empty for a plain box.
    lower, upper : int
        Where its first pixels begin, and where they end as seen from the extents; (width, height).
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @property
    def im2col(self) -> bool:
        """Whether a copy walks through pixels as a filter tap does."""
        return bool(self.steps)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def element_steps(self) -> tuple[int, ...]:
        """Steps of every dimension."""
        return (1, *self.steps, 1) if self.im2col else (1,) * len(self.extents)

    def faults(self) -> list[str]:
        """What the driver would refuse."""
        found = [
            f"a stride of {stride} bytes: the copy engine wants multiples of {STRIDE_UNIT} below 2**40"
            for stride in self.strides
            if stride % STRIDE_UNIT or stride >= MOST["stride"]
        ]
        most_lines = MOST["pixels" if self.im2col else "box"]
        limits = [("extent", extent, 1, MOST["extent"]) for extent in self.extents]
        limits += [("box", self.box[0] * self.itemsize, LINE, LINE)]
        limits += [("box", extent, 1, most_lines) for extent in self.box[1:]]
        limits += [("step", step, 1, MOST["step"]) for step in self.steps]
        limits += [("corner", corner, *CORNERS) for corner in (*self.lower, *self.upper)]
        found += [
            f"{name} {value}: the copy engine takes {least} to {most}"
            for name, value, least, most in limits
            if not least <= value <= most
        ]
        return found

    def encode(self, address: int) -> Any:
        """The map of the array at this address, as a value that a kernel takes.

        Raises
        ------
        TensorMapError
            When the driver is missing, too old (before CUDA 12.0) or refuses.
        """
        raw = np.zeros(BYTES + 64, np.uint8)
        start = -raw.ctypes.data % 64
        encoded = raw[start : start + BYTES].view(f"V{BYTES}").reshape(())
        head = (
            ctypes.c_void_p(encoded.ctypes.data),
            ctypes.c_int(TYPES[self.dtype]),
            ctypes.c_uint32(len(self.extents)),
            ctypes.c_void_p(address),
            _values(ctypes.c_uint64, self.extents),
            _values(ctypes.c_uint64, self.strides),
        )
        steps = _values(ctypes.c_uint32, self.element_steps)
        kinds = [ctypes.c_int(v) for v in (INTERLEAVE_NONE, SWIZZLE_128B, PROMOTE_L2_128B, FILL_ZEROS)]
        if self.im2col:
            corners = (_values(ctypes.c_int, self.lower), _values(ctypes.c_int, self.upper))
            channels, pixels = map(ctypes.c_uint32, self.box)
            status = _driver("cuTensorMapEncodeIm2col")(*head, *corners, channels, pixels, steps, *kinds)
        else:
            status = _driver("cuTensorMapEncodeTiled")(*head, _values(ctypes.c_uint32, self.box), steps, *kinds)
        if status:
            raise TensorMapError(f"the driver refuses {self} at address {address:#x}: CUresult {status}")
        return encoded


Passing = Callable[[Sequence[Any]], Sequence[Any]]


def passing(maps: Sequence[TensorMap | None], address: Callable[[Any], int]) -> Passing:
    """What puts the maps in the place of the arrays they are of. Those of the last few addresses are kept."""
    encoders = [(i, functools.lru_cache(maxsize=16)(m.encode)) for i, m in enumerate(maps) if m is not None]

    def passed(arguments: Sequence[Any]) -> Sequence[Any]:
        given = list(arguments)
        for i, encoded in encoders:
            given[i] = encoded(address(given[i]))
        return given

    return passed


def _values(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)


@functools.cache
def _driver(function: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), function)
    except (OSError, AttributeError) as error:
        raise TensorMapError(f"no driver with tensor maps: {error}") from None
