"""A CUDA kernel as text: a file of this folder, and the constants that make it one layer's."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

from autoconv.cuda.codegen.tensor_map import TensorMap, Texture
from autoconv.layer import DIRECTIONS, LAYOUTS, ConvLayer

Constant = tuple[str, int]
TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "bfloat16": "bfloat16_t"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@functools.cache
def file_text(name: str) -> str:
    """The text of a file of this folder, without comments, which must not change what is compiled."""
    text = resources.files("autoconv.cuda").joinpath(name).read_text(encoding="utf-8")
    return _COMMENT.sub("", text).replace("#pragma once\n", "")


@dataclass(frozen=True)
class Unit:
    """One kernel, ready to be compiled, and the shape of its launch.

    Attributes
    ----------
    function : str
        The kernel's name.
    files : str
        Files of this folder that make up the text, the kernel's last.
    layer : ConvLayer
        Whose extents, types and tail the kernel is compiled for.
    grid : int, three times
    threads : int
        To a block, in one dimension; known to the kernel as `THREADS`, unless the constants say otherwise.
    blocks : int
        Blocks to a multiprocessor that the tile is designed for; known as `BLOCKS`. It caps registers
        and shared memory, and the compile gate holds the kernel to it.
    shared, dynamic : int
        Bytes of shared memory to a block, and how many of them are asked for at the launch.
    constants : (name, value) pairs
        What else the kernel is specialised by.
    preamble : str
        Text that stands before the file: generated tables.
    capability : int
        The least compute capability, times ten, that has them.
    persistent : bool
        Whether a block takes one piece of work after the other, so that no more are launched than are resident.
    maps : TensorMap, Texture or None
        For each of the first arguments, how the copy engine or the texture units see the array: the kernel takes
        the map in its place.
    """

    function: str
    files: tuple[str, ...]
    layer: ConvLayer
    grid: tuple[int, int, int]
    threads: int
    blocks: int
    shared: int = 0
    dynamic: int = 0
    constants: tuple[Constant, ...] = ()
    preamble: str = ""
    capability: int = 75
    persistent: bool = False
    maps: tuple[TensorMap | Texture | None, ...] = ()

    def resident(self, multiprocessors: int) -> tuple[int, int, int]:
        """The grid to launch of a persistent kernel."""
        return (min(self.grid[0], self.blocks * multiprocessors), *self.grid[1:])

    @property
    def text(self) -> str:
        """The whole translation unit; `#line` makes a compiler's message name the file."""
        constants = {"THREADS": self.threads, "BLOCKS": self.blocks} | dict(self.constants)
        lines = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
        files = ((name, file_text(name)) for name in ("common/common.cuh", *self.files))
        body = "".join(f'#line 1 "{name}"\n{text}\n' for name, text in files)
        first = f'#line 1 "codegen/ptx.cuh"\n{file_text("codegen/ptx.cuh")}\n'
        return f"{first}{layer_constants(self.layer)}{lines}{self.preamble}{body}"


def wide(layer: ConvLayer) -> bool:
    """Whether a position in one of the arrays, or in the padded image, needs more than 32 bits."""
    elements = max(
        layer.N * layer.C * layer.H * layer.W,
        layer.N * layer.K * layer.P * layer.Q,
        layer.K * (layer.C // layer.groups) * layer.R * layer.S,
    )
    padded = max(extent + 2 * sum(sides) for extent, sides in zip((layer.H, layer.W), layer.padding, strict=True))
    return max(elements, padded) >= 2**30


def layer_constants(layer: ConvLayer) -> str:
    """The layer as C++ constants, under the names it has in Python."""
    offset = "long long" if wide(layer) else "int"
    types = f"using Offset = {offset};\nusing T = {TYPES[layer.dtype]};\nusing Acc = {TYPES[layer.accumulator.name]};\n"
    extents = {name: getattr(layer, name) for name in ("N", "C", "H", "W", "K", "R", "S", "P", "Q")}
    extents |= {"GROUPS": layer.groups}
    for name in ("stride", "dilation"):
        extents |= dict(zip((f"{name.upper()}_H", f"{name.upper()}_W"), getattr(layer, name), strict=True))
    extents |= {"PAD_TOP": layer.padding[0][0], "PAD_LEFT": layer.padding[1][0]}
    flags = {
        "UNPADDED": int(not any(map(any, layer.padding))),
        "LAYOUT": LAYOUTS.index(layer.layout),
        "DIRECTION": DIRECTIONS.index(layer.direction),
        "BIAS": int(layer.bias),
        "RESIDUAL": int(layer.residual),
        "RELU": int(layer.activation == "relu"),
    }
    return (
        types
        + "".join(f"constexpr Offset {name} = {value};\n" for name, value in extents.items())
        + "".join(f"constexpr int {name} = {value};\n" for name, value in flags.items())
    )
