"""How units of the hardware see an array: tensor maps for Hopper's copy engine (TMA), textures for texture units.

One description serves the driver, which encodes it (CUDA driver API, "Tensor Map Object Management" and "Texture
Object Management"), and the tests' emulator, which reads it as it stands.
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
LINE = 128  # bytes of a line in shared memory, the innermost extent of a box, over which the widest swizzle goes
STRIDE_UNIT = 16  # bytes
MOST = {"stride": 2**40, "extent": 2**32, "box": 256, "pixels": 1024, "pixel stride": 8}
CORNERS = (-128, 127)  # of the box of first pixels, for two spatial dimensions
OFFSETS = (0, 255)  # of a filter tap, likewise

# CUtensorMapDataType. Values travel as integers, untouched, but where float32 is rounded to tf32 on its way.
TYPES = {"float16": 1, "bfloat16": 1, "float32": 2, "tf32": 11}
SWIZZLES = {64: 2, LINE: 3}  # CUtensorMapSwizzle, by the bytes of a line
INTERLEAVE_NONE, PROMOTE_L2_128B, FILL_ZEROS = 0, 2, 0

# Of textures in linear memory, on every architecture here: cudaDeviceProp and the CUDA C++ Programming Guide
TEXTURE_ALIGNMENT, PITCH_UNIT = 512, 32  # bytes
MOST_TEXELS = {"width": 131072, "height": 65000, "pitch": 2097120}
PITCH_2D, BORDER, POINT, READ_INTEGERS = 3, 3, 0, 1  # CUresourcetype, CUaddress_mode, CUfilter_mode, CU_TRSF_
UNSIGNED = {2: (2, 1), 4: (3, 1), 8: (3, 2)}  # bytes of an element: CUarray_format and channels


class TensorMapError(AutoconvError, RuntimeError):
    """A tensor map or a texture that the driver refuses, or no driver that knows them."""


@dataclass(frozen=True)
class TensorMap:
    """An array of up to four dimensions, innermost first, and the box of it that one copy brings.

    Attributes
    ----------
    dtype : str
        Of the array; or "tf32", of float32 that is rounded.
    extents : int
        Elements in each dimension.
    strides : int
        Bytes from one to the next, of every dimension but the innermost.
    box : int
        Elements of a copy in each dimension; for im2col, channels and pixels.
    pixel_strides : int
        Distance of neighbouring pixels of an im2col copy, (width, height). Empty for a plain box.
    lower, upper : int
        Where its first pixels begin, and where they end as seen from the extents; (width, height).
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    pixel_strides: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @property
    def im2col(self) -> bool:
        """Whether a copy walks through pixels as a filter tap does."""
        return bool(self.pixel_strides)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype in ("float32", "tf32") else 2

    @property
    def line(self) -> int:
        """Bytes of a line in shared memory."""
        return self.box[0] * self.itemsize

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Of every dimension, as the driver calls them."""
        return (1, *self.pixel_strides, 1) if self.im2col else (1,) * len(self.extents)

    def faults(self) -> list[str]:
        """What the driver would refuse."""
        found = [
            f"stride of the copy engine: expected a multiple of {STRIDE_UNIT} bytes below 2**40, got {stride}"
            for stride in self.strides
            if stride % STRIDE_UNIT or stride >= MOST["stride"]
        ]
        most_lines = MOST["pixels" if self.im2col else "box"]
        limits = [("extent", extent, 1, MOST["extent"]) for extent in self.extents]
        limits += [("line", self.line, min(SWIZZLES), max(SWIZZLES))]
        limits += [("box", extent, 1, most_lines) for extent in self.box[1:]]
        limits += [("pixel stride", stride, 1, MOST["pixel stride"]) for stride in self.pixel_strides]
        limits += [("corner", corner, *CORNERS) for corner in (*self.lower, *self.upper)]
        found += [
            f"{name} of the copy engine: expected {least} to {most}, got {value}"
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
        element_strides = _values(ctypes.c_uint32, self.element_strides)
        kinds = [ctypes.c_int(v) for v in (INTERLEAVE_NONE, SWIZZLES[self.line], PROMOTE_L2_128B, FILL_ZEROS)]
        if self.im2col:
            corners = (_values(ctypes.c_int, self.lower), _values(ctypes.c_int, self.upper))
            channels, pixels = map(ctypes.c_uint32, self.box)
            status = _driver("cuTensorMapEncodeIm2col")(*head, *corners, channels, pixels, element_strides, *kinds)
        else:
            status = _driver("cuTensorMapEncodeTiled")(
                *head, _values(ctypes.c_uint32, self.box), element_strides, *kinds
            )
        if status:
            raise TensorMapError(f"the driver refuses {self} at address {address:#x}: CUresult {status}")
        return encoded


@dataclass(frozen=True)
class Texture:
    """An array as lines of equal length, one after the other; beyond its borders lie zeros.

    Attributes
    ----------
    itemsize : int
        Bytes of an element, which travels as an integer, untouched.
    width, height : int
        Elements of a line, and lines.
    """

    itemsize: int
    width: int
    height: int

    @property
    def pitch(self) -> int:
        """Bytes of a line."""
        return self.width * self.itemsize

    def faults(self) -> list[str]:
        """What the texture units cannot do."""
        found = [
            f"{name}: expected at most {most} in a texture, got {getattr(self, name)}"
            for name, most in MOST_TEXELS.items()
            if getattr(self, name) > most
        ]
        if self.pitch % PITCH_UNIT:
            found.append(f"lines: expected multiples of {PITCH_UNIT} bytes in a texture, got {self.pitch}")
        return found

    def encode(self, address: int) -> Any:
        """The texture object of the array at this address, as a value that a kernel takes.

        It is never destroyed: a launch under way or a captured graph may hold it.

        Raises
        ------
        TensorMapError
            When the driver is missing or refuses.
        """
        format_, channels = UNSIGNED[self.itemsize]
        made = np.zeros((), np.uint64)
        resource = _Resource(
            kind=PITCH_2D, address=address, format=format_, channels=channels,
            width=self.width, height=self.height, pitch=self.pitch,
        )  # fmt: skip
        sampling = _Sampling(address_modes=(BORDER,) * 3, filter_mode=POINT, flags=READ_INTEGERS)
        target = ctypes.c_void_p(made.ctypes.data)
        status = _driver("cuTexObjectCreate")(target, ctypes.byref(resource), ctypes.byref(sampling), None)
        if status:
            raise TensorMapError(f"the driver refuses {self} at address {address:#x}: CUresult {status}")
        return made[()]


class _Resource(ctypes.Structure):
    """CUDA_RESOURCE_DESC of two dimensions in linear memory."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("pitch", ctypes.c_size_t),
        ("reserved", ctypes.c_int * 22),
        ("flags", ctypes.c_uint),
    )


class _Sampling(ctypes.Structure):
    """CUDA_TEXTURE_DESC; coordinates are in texels, the border is zero."""

    _fields_ = (
        ("address_modes", ctypes.c_int * 3),
        ("filter_mode", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_int * 21),
    )


Passing = Callable[[Sequence[Any]], Sequence[Any]]


def passing(maps: Sequence[TensorMap | Texture | None], address: Callable[[Any], int]) -> Passing:
    """What puts the maps in the place of the arrays they are of. Those of the last few addresses are kept.

    Textures of all of them: there is no more to a texture object than to a line of a table, and it stays.
    """
    encoders = [
        (i, functools.lru_cache(maxsize=16 if isinstance(m, TensorMap) else None)(m.encode))
        for i, m in enumerate(maps)
        if m is not None
    ]

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
        raise TensorMapError(f"no driver with tensor maps or textures: {error}") from None
