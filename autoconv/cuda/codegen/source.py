"""A CUDA kernel as text: a file and what it includes, and the constants that make it one layer's.

Includes are resolved here, not by the compiler: NVRTC sees one text, whose hash names the machine code. They stand at
the top of a file, and a file is included once.
"""

from __future__ import annotations

import functools
import itertools
import posixpath
import re
from dataclasses import dataclass
from importlib import resources

from autoconv.cuda.codegen.tensor_map import TensorMap, Texture
from autoconv.layer import DIRECTIONS, LAYOUTS, ConvLayer

Constant = tuple[str, int]
TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "bfloat16": "bfloat16_t"}
# Their texts are examples, for editors: each kernel gets its own in the place of one.
GENERATED = "codegen/layer.cuh"
GENERATED_SHAPES = "operators/shapes.cuh"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@functools.cache
def file_text(name: str) -> str:
    """The text of a file of `autoconv.cuda` without comments, which must not change what is compiled.

    In the place of what tells of other files stand empty lines, so that lines keep their numbers.
    """
    return _INCLUDE.sub("", _stripped(name)).replace("#pragma once", "")


@functools.cache
def files_of(name: str) -> tuple[str, ...]:
    """What a file includes, in the order in which a compiler comes by it, each once; then the file itself."""
    folder = posixpath.dirname(name)
    others = (posixpath.normpath(posixpath.join(folder, other)) for other in _INCLUDE.findall(_stripped(name)))
    return (*dict.fromkeys(itertools.chain.from_iterable(map(files_of, others))), name)


def _stripped(name: str) -> str:
    text = resources.files("autoconv.cuda").joinpath(name).read_text(encoding="utf-8")
    return _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)


@dataclass(frozen=True)
class Unit:
    """One kernel, ready to be compiled, and the shape of its launch.

    Attributes
    ----------
    function : str
        The kernel's name.
    file : str
        Where it stands, as a path in `autoconv.cuda`; what that file includes belongs to the text.
    layer : ConvLayer or None
        Whose extents, types and epilogue the kernel is compiled for; None for what computes no layer.
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
        Text that stands before the files: generated tables.
    capability : int
        The least compute capability, times ten, that has them.
    persistent : bool
        Whether a block takes one piece of work after the other, so that no more are launched than are resident.
    maps : TensorMap, Texture or None
        For each of the first arguments, how the copy engine or the texture units see the array: the kernel takes
        the map in its place.
    """

    function: str
    file: str
    layer: ConvLayer | None
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

    def resident(self, multiprocessors: int, blocks: int) -> tuple[int, int, int]:
        """The grid to launch of a persistent kernel of which a multiprocessor really holds so many blocks."""
        return (min(self.grid[0], min(self.blocks, max(blocks, 1)) * multiprocessors), *self.grid[1:])

    @property
    def text(self) -> str:
        """The whole translation unit; `#line` makes a compiler's message name the file."""
        constants = {"THREADS": self.threads, "BLOCKS": self.blocks} | dict(self.constants)
        lines = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
        generated = f"{layer_constants(self.layer) if self.layer else ''}{lines}{self.preamble}"
        examples = GENERATED, GENERATED_SHAPES
        texts = ((name, generated if name in examples else file_text(name)) for name in files_of(self.file))
        return "".join(f'#line 1 "{name}"\n{text}\n' for name, text in texts)


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
        "PRELU": int(layer.activation == "prelu"),
    }
    return (
        types
        + "".join(f"constexpr Offset {name} = {value};\n" for name, value in extents.items())
        + "".join(f"constexpr int {name} = {value};\n" for name, value in flags.items())
    )
