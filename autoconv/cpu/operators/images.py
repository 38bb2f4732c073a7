"""Images that lie apart, as parts of larger ones do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoconv.cpu.codegen.ir import Value


class Apart(NamedTuple):
    """How many planes, or rows, an image has, and the elements from image to image of the input and of the output."""

    planes: int
    source: int
    target: int


def places(plane: Value, sizes: Sequence[int], apart: Apart | None) -> list[Value]:
    """Where a plane of all images begins in the input and in the output, in which planes are so many elements."""
    if apart is None:
        return [plane * size for size in sizes]
    image, rest = plane // apart.planes, plane % apart.planes
    return [image * pitch + rest * size for pitch, size in zip(apart[1:], sizes, strict=True)]
