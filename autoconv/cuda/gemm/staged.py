"""Tensor cores for arrays they do not take as they are: NCHW, or channels that are no whole runs of 16 bytes."""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoconv.algorithm import Array, Kernel, Params
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import CudaAlgorithm, Launch, aligned, ceil_div
from autoconv.cuda.common.model import Demand, streaming
from autoconv.cuda.gemm.tensor import Tensor, TensorBF16x6, TensorTF32x3
from autoconv.cuda.hopper.hopper import Hopper
from autoconv.cuda.hopper.split import HopperBF16x6
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

FILE = "gemm/staged.cu"
THREADS, BLOCKS = 256, 4
AREA = 1024  # elements that a block takes
MOST_DEEP = 32  # channels of them
RUN = 16  # bytes that travel at once


@dataclass(frozen=True)
class Move:
    """An array in one order, copied to another: as `images` of channels and places, the channels first or last.

    Attributes
    ----------
    images, channels : two ints
        Of the source and of the target.
    places : int
    first : two bools
        Whether channels come before places, in the source and in the target.
    """

    images: tuple[int, int]
    channels: tuple[int, int]
    places: int
    first: tuple[bool, bool]

    @property
    def idle(self) -> bool:
        """Whether both are the same array."""
        ordered = self.first[0] == self.first[1] or self.places == 1
        return ordered and self.images[0] == self.images[1] and self.channels[0] == self.channels[1]

    @property
    def back(self) -> Move:
        """The same the other way."""
        return Move(self.images[::-1], self.channels[::-1], self.places, self.first[::-1])

    @property
    def elements(self) -> int:
        """Of the target."""
        return self.images[1] * self.channels[1] * self.places

    def unit(self, layer: ConvLayer) -> Unit:
        """The kernel that does it."""
        deep = min(MOST_DEEP, 1 << (self.channels[1] - 1).bit_length())
        long = AREA // deep
        blocks = self.images[1] * ceil_div(self.places, long) * ceil_div(self.channels[1], deep)
        constants = (
            ("FROM_IMAGES", self.images[0]),
            ("FROM_CHANNELS", self.channels[0]),
            ("TO_CHANNELS", self.channels[1]),
            ("DEEP", deep),
            ("PLACES", self.places),
            ("FROM_FIRST", int(self.first[0])),
            ("TO_FIRST", int(self.first[1])),
        )
        shared = (AREA + MOST_DEEP) * layer.itemsize  # a row of each channel, a little apart
        return Unit("stage", FILE, layer, (blocks, 1, 1), THREADS, BLOCKS, shared, constants=constants)


@functools.lru_cache(16)  # every candidate of a grid asks for that of its layer
def staged(layer: ConvLayer) -> ConvLayer:
    """The layer in NHWC, its channels (and filters, where they too are read in runs) rounded up to whole runs."""
    run = RUN // layer.itemsize
    C, K = (ceil_div(n, run) * run for n in (layer.C, layer.K))
    return layer.replace(layout="NHWC", C=C, K=layer.K if layer.direction == "fwd" else K)


def moves(layer: ConvLayer) -> dict[str, Move]:
    """From every array of the layer to that of the staged one."""
    to = staged(layer)
    first = layer.layout == "NCHW", False
    x = Move((layer.N, layer.N), (layer.C, to.C), layer.H * layer.W, first)
    y = Move((layer.N, layer.N), (layer.K, to.K), layer.P * layer.Q, first)
    w = Move((layer.K, to.K), (layer.C, to.C), layer.R * layer.S, first)
    a, b, out = {"fwd": (x, w, y), "dgrad": (y, w, x), "wgrad": (x, y, w)}[layer.direction]
    found = {"a": a, "b": b, "out": out}
    return found | {"residual": y} if layer.residual else found


class Staged(CudaAlgorithm):
    """Another family's kernels, on copies of the operands in the order it wants; the output goes back.

    Whoever keeps arrays in NCHW pays for two passes over memory, and so does cuDNN. Channels that are no whole runs, as
    the three of a picture, are followed by zeros. Filters are copied when they are packed.
    """

    files = (FILE,)
    groupings = ("dense",)

    @property
    @abstractmethod
    def inner(self) -> CudaAlgorithm:
        """The family that computes."""

    def candidates(self, layer: ConvLayer, device: CUDA) -> Iterable[Params]:
        return self.inner.candidates(staged(layer), device)

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        if all(move.idle for move in moves(layer).values()):
            return [
                f"layout: expected NCHW, or channels in parts of {RUN} bytes: {self.inner.name} takes this as it is"
            ]
        return self.inner.unfit(staged(layer), params)

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return super().refusals(layer, device, params) or self.inner.refusals(staged(layer), device, params)

    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        ways = (move.back if name == "out" else move for name, move in moves(layer).items() if not move.idle)
        return (*self.inner.units(staged(layer), params), *(way.unit(staged(layer)) for way in ways))

    def packed_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return aligned(self.inner.packed_bytes(staged(layer), device, params)) + _filters_bytes(layer)

    def workspace_bytes(self, layer: ConvLayer, device: CUDA, params: Params) -> int:
        return sum(_parts(layer).values()) + self.inner.workspace_bytes(staged(layer), device, params)

    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        found = []
        for name, move in moves(layer).items():
            if not move.idle and (name != "b" or not _filters_bytes(layer)):
                way = move.back if name == "out" else move
                found.append(streaming(way.unit(staged(layer)), 2.0 * move.elements * layer.itemsize))
        return [*found, *self.inner.demands(staged(layer), device, params)]

    def build(self, layer: ConvLayer, device: CUDA, params: Params) -> Kernel:
        return StagedKernel(self, layer, device, params)


class StagedKernel(Kernel):
    """Copies in the workspace, the inner kernel on them, the output from there."""

    def __init__(self, algorithm: Staged, layer: ConvLayer, device: CUDA, params: Params) -> None:
        to = staged(layer)
        self._inner = algorithm.inner.build(to, device, params)
        self._filters = aligned(self._inner.packed_bytes)  # where they begin, in the order that the inner one packs
        shapes = *to.input_shapes, to.output_shape, to.y_shape
        self._shapes = dict(zip(("a", "b", "out", "residual"), shapes, strict=True))
        self._dtype, self._parts = layer.numpy_dtype, _parts(layer)
        self._launches: dict[str, Launch] = {}
        for name, move in moves(layer).items():
            if not move.idle:
                way = move.back if name == "out" else move
                (self._launches[name],) = algorithm.load(device, [way.unit(to)])
        self.workspace_bytes = algorithm.workspace_bytes(layer, device, params)
        self.packed_bytes = algorithm.packed_bytes(layer, device, params)

    def pack(self, w: Array, packed: Array) -> None:
        if not self.packed_bytes:
            super().pack(w, packed)
        if "b" in self._launches:
            self._launches["b"](w, packed[self._filters :])
            w = self._as_staged(packed[self._filters :], "b")
        if self._inner.packed_bytes:
            self._inner.pack(w, packed[: self._inner.packed_bytes])

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        given = {"a": a, "b": b, "out": out, "residual": residual}
        starts = [0, *itertools.accumulate(self._parts.values())]
        for name, start in zip(self._parts, starts, strict=False):
            room = self._as_staged(workspace[start:], name)
            if name != "out":
                self._launches[name](given[name], room)
            given[name] = room
        if self._inner.packed_bytes:
            given["b"] = b[: self._inner.packed_bytes]
        elif self.packed_bytes:
            given["b"] = self._as_staged(b, "b")
        self._inner.run(given["a"], given["b"], given["out"], bias, given["residual"], workspace[starts[-1] :])
        if "out" in self._launches:
            self._launches["out"](given["out"], out)

    def _as_staged(self, room: Array, name: str) -> Array:
        """The array of this name in bytes that begin with it."""
        nbytes = math.prod(self._shapes[name]) * self._dtype.itemsize
        return room[:nbytes].view(self._dtype).reshape(self._shapes[name])


def _filters_bytes(layer: ConvLayer) -> int:
    """Of the filters in the order that the inner family wants, where they are packed."""
    filters = moves(layer)["b"]
    return filters.elements * layer.itemsize if layer.direction != "wgrad" and not filters.idle else 0


def _parts(layer: ConvLayer) -> dict[str, int]:
    """Bytes of the workspace to each copy; that of the filters is packed, but where it is the output."""
    return {
        name: aligned(move.elements * layer.itemsize)
        for name, move in moves(layer).items()
        if not move.idle and (name != "b" or layer.direction == "wgrad")
    }


class TensorStaged(Staged):
    """`gemm.tensor` for NCHW, and for any number of channels."""

    name = "gemm.tensor.staged"
    inner = Tensor()
    dtypes, exact = Tensor.dtypes, True


class TensorTF32x3Staged(Staged):
    """`gemm.tensor.tf32x3` for NCHW, and for any number of channels."""

    name = "gemm.tensor.tf32x3.staged"
    inner = TensorTF32x3()
    dtypes = TensorTF32x3.dtypes


class TensorBF16x6Staged(Staged):
    """`gemm.tensor.bf16x6` for NCHW, and for any number of channels."""

    name = "gemm.tensor.bf16x6.staged"
    inner = TensorBF16x6()
    dtypes = TensorBF16x6.dtypes


class HopperStaged(Staged):
    """`gemm.hopper` for NCHW, and for any number of channels."""

    name = "gemm.hopper.staged"
    inner = Hopper()
    dtypes, exact = Hopper.dtypes, True


class HopperBF16x6Staged(Staged):
    """`gemm.hopper.bf16x6` for NCHW, and for any number of channels."""

    name = "gemm.hopper.bf16x6.staged"
    inner = HopperBF16x6()
    dtypes = HopperBF16x6.dtypes
