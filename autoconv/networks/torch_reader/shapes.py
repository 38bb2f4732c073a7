"""ATen's operators that move elements in terms of ours."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch

from autoconv.networks.operators.foreign_torch import called
from autoconv.networks.operators.sampling import Sampler
from autoconv.networks.operators.shapes import Concat, Transpose
from autoconv.networks.torch_reader.call import Call, Lowering


def _reshape(argument: str, call: Call) -> str:
    x, shape = call.value("self"), [*call[argument]]
    if -1 in shape:
        known = math.prod(extent for extent in shape if extent != -1)
        shape[shape.index(-1)] = math.prod(call.shape_of(x)) // max(known, 1)
    return call.reshape(x, shape)


def _unsqueeze(call: Call) -> str:
    shape = list(call.shape("self"))
    shape.insert(call.axis("dim", len(shape) + 1), 1)
    return call.reshape(call.value("self"), shape)


def _squeeze(call: Call) -> str:
    shape = call.shape("self")
    given = call["dim"] if call.has("dim") else None
    axes = call.axes([given] if isinstance(given, int) else given, len(shape))
    return call.reshape(call.value("self"), [e for n, e in enumerate(shape) if n not in axes or e != 1])


def _permute(call: Call) -> str:
    rank = len(call.shape("self"))
    return call.add(Transpose(tuple(axis % rank for axis in call["dims"])), call.value("self"))


def _transpose(call: Call) -> str:
    order = list(range(len(call.shape("self"))))
    a, b = (call.axis(name, len(order)) for name in ("dim0", "dim1"))
    order[a], order[b] = order[b], order[a]
    return call.add(Transpose(tuple(order)), call.value("self"))


def _concat(call: Call) -> str:
    values = call.values("tensors")
    values = [name for name in values if call.shape_of(name) != (0,)] or values[:1]
    axis = call.axis("dim", len(call.shape_of(values[0])))
    return values[0] if len(values) == 1 else call.add(Concat(axis), *values)


def _parts(call: Call) -> list[str]:
    """Parts along an axis: of one size, or of sizes that are given."""
    x, axis = call.value("self"), call.axis("dim", len(call.shape("self")))
    extent = call.shape_of(x)[axis]
    if call.has("split_sizes"):
        sizes = list(call["split_sizes"])
    else:
        each = call["split_size"]
        sizes = [min(each, extent - start) for start in range(0, extent, each)]
    return [call.slice_axis(x, axis, sum(sizes[:n]), size) for n, size in enumerate(sizes)]


def _slice(call: Call) -> str:
    x, axis = call.value("self"), call.axis("dim", len(call.shape("self")))
    places = range(*slice(call["start"], call["end"], call["step"]).indices(call.shape_of(x)[axis]))
    if not places:
        call.fail(f"start={call['start']}, end={call['end']}: nothing is left of {call.shape_of(x)}")
    if len(places) == call.shape_of(x)[axis]:
        return x
    return call.slice_axis(x, axis, places[0], len(places), call["step"])


def _without(call: Call, axis: int, index: int) -> str:
    """What lies at one place of an axis, which goes."""
    x = call.value("self")
    shape = call.shape_of(x)
    return call.reshape(call.slice_axis(x, axis, index % shape[axis], 1), (*shape[:axis], *shape[axis + 1 :]))


def _select(call: Call) -> str:
    return _without(call, call.axis("dim", len(call.shape("self"))), call["index"])


def _unbind(call: Call) -> list[str]:
    axis = call.axis("dim", len(call.shape("self")))
    return [_without(call, axis, index) for index in range(call.shape("self")[axis])]


def _expand(call: Call) -> str:
    return _expanded(call, call.value("self"), call["size"])


def _expanded(call: Call, x: str, size: Sequence[int]) -> str:
    """An array that repeats along axes on which it has an extent of 1; -1 keeps what there is."""
    shape = call.shape_of(x)
    x = call.reshape(x, (*(1,) * (len(size) - len(shape)), *shape))
    for axis, extent in enumerate(size):
        if extent != -1 and call.shape_of(x)[axis] == 1:
            x = call.taken(x, axis, [0] * extent)
    return x


def _copy(call: Call) -> str:
    """What overwrites all of an array, in its shape and type."""
    x, target = call.value("src"), call.graph.types[call.value("self")]
    if call.graph.types[x].dtype != target.dtype:
        call.fail(f"expected arrays of one type, got {call.graph.types[x]} to copy into {target}")
    return _expanded(call, x, target.shape)


def _slice_scatter(call: Call) -> str:
    """An array of which some places of an axis are those of another."""
    x, axis = call.value("self"), call.axis("dim", len(call.shape("self")))
    places = range(*slice(call["start"], call["end"], call["step"]).indices(call.shape_of(x)[axis]))
    return _replaced(call, x, call.value("src"), axis, places)


def _select_scatter(call: Call) -> str:
    """The same of a single place, whose axis the other array lacks."""
    x, axis = call.value("self"), call.axis("dim", len(call.shape("self")))
    shape = list(call.shape_of(x))
    index = call["index"] % shape[axis]
    shape[axis] = 1
    return _replaced(call, x, call.reshape(call.value("src"), shape), axis, range(index, index + 1))


def _replaced(call: Call, x: str, part: str, axis: int, places: range) -> str:
    extent = call.shape_of(x)[axis]
    if not places or len(places) == extent:
        return part if places else x
    if places.step == 1:
        ends = ((0, places[0]), (places[-1] + 1, extent - places[-1] - 1))
        first, last = ([call.slice_axis(x, axis, start, count)] if count else [] for start, count in ends)
        return call.add(Concat(axis), *first, part, *last)
    found = [extent + places.index(place) if place in places else place for place in range(extent)]
    return call.taken(call.add(Concat(axis), x, part), axis, found)


def _repeat(call: Call) -> str:
    x, repeats = call.value("self"), call["repeats"]
    shape = call.shape_of(x)
    x = call.reshape(x, (*(1,) * (len(repeats) - len(shape)), *shape))
    for axis, times in enumerate(repeats):
        x = call.taken(x, axis, [*range(call.shape_of(x)[axis])] * times)
    return x


def _flip(call: Call) -> str:
    x, shape = call.value("self"), call.shape("self")
    for axis in call.axes(call["dims"], len(shape)):
        x = call.slice_axis(x, axis, shape[axis] - 1, shape[axis], -1)
    return x


def _index_select(call: Call) -> str:
    axis = call.axis("dim", len(call.shape("self")))
    return call.taken(call.value("self"), axis, _places(call, call["index"], 0, call.shape("self")[axis]))


def _index(call: Call) -> str:
    ((axis, index),) = [(n, index) for n, index in enumerate(call["indices"]) if index is not None]
    extent = call.shape("self")[axis]
    return call.taken(call.value("self"), axis, _places(call, index, -extent, extent))


def _places(call: Call, index: str, first: int, end: int) -> list[int]:
    """Constants that count places of an axis; others are left to PyTorch, which refuses them in the run."""
    found = call.graph.constants[index]
    if found.ndim != 1 or found.dtype.kind != "i":
        call.fail(f"expected places of one axis, got {call.graph.types[index]}")
    places = [*map(int, found)]
    if not all(first <= place < end for place in places):
        call.fail(f"expected places from {first} to {end - 1}, got {places}")
    return places


def _pad(mode: Literal["constant", "reflect", "edge", "wrap"], argument: str, call: Call) -> str:
    x, given = call.value("self"), call[argument]
    rank = len(call.shape_of(x))
    before, after = [0] * rank, [0] * rank
    for n in range(len(given) // 2):  # the last axis comes first
        before[rank - 1 - n], after[rank - 1 - n] = given[2 * n], given[2 * n + 1]
    return call.pad(x, before, after, mode, call.scalar("value") if call.has("value") else 0.0)


def _upsample_nearest(call: Call) -> str:
    """By PyTorch itself, which is given an image of the numbers of its rows, and one of those of its columns.

    How it rounds depends on the factor, the type, the extents, the memory format and the processor.
    """
    x, image = call.value("input"), call.traced("input")
    last = image.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if last else torch.contiguous_format
    dtype = torch.float64 if image.dtype == torch.float64 else torch.float32  # in which it counts those of other types
    given = {name: call[name] for name in ("output_size", "scale_factors")}
    for axis in (2, 3):
        numbers = torch.arange(image.shape[axis], dtype=dtype).reshape(-1, *[1] * (3 - axis))
        numbers = numbers.expand(1, *image.shape[1:]).contiguous(memory_format=memory_format)
        (seen,) = called(call.target, {"input": numbers, **given})
        x = call.taken(x, axis, seen.amax((0, 1, 5 - axis)).tolist())
    return x


def _upsample(mode: str, call: Call) -> str:
    shape = call.shape("input")[2:]
    aligned = bool(call["align_corners"]) if call.has("align_corners") else False
    factors = call["scale_factors"] if call.has("scale_factors") else None
    sizes = call["output_size"] if factors is None else [math.floor(e * f) for e, f in zip(shape, factors, strict=True)]
    scales = [new / old for old, new in zip(shape, sizes, strict=True)] if factors is None or aligned else factors
    if mode == "linear":  # an axis that keeps its extent is copied, whatever the factor
        scales = [1.0 if new == old else scale for old, new, scale in zip(shape, sizes, scales, strict=True)]
    coordinate = "align_corners" if aligned else "half_pixel"
    return call.resample(Sampler(mode=mode, coordinate=coordinate), sizes, scales)


LOWERINGS: dict[str, Lowering] = {
    "aten::view": functools.partial(_reshape, "size"),
    "aten::_unsafe_view": functools.partial(_reshape, "size"),
    "aten::reshape": functools.partial(_reshape, "shape"),
    "aten::unsqueeze": _unsqueeze,
    "aten::squeeze": _squeeze,
    "aten::squeeze.dim": _squeeze,
    "aten::squeeze.dims": _squeeze,
    "aten::permute": _permute,
    "aten::transpose.int": _transpose,
    "aten::cat": _concat,
    "aten::split.Tensor": _parts,
    "aten::split_with_sizes": _parts,
    "aten::slice.Tensor": _slice,
    "aten::select.int": _select,
    "aten::unbind.int": _unbind,
    "aten::expand": _expand,
    "aten::copy": _copy,
    "aten::slice_scatter": _slice_scatter,
    "aten::select_scatter": _select_scatter,
    "aten::repeat": _repeat,
    "aten::flip": _flip,
    "aten::index_select": _index_select,
    "aten::index.Tensor": _index,
    "aten::constant_pad_nd": functools.partial(_pad, "constant", "pad"),
    **{f"aten::reflection_pad{n}d": functools.partial(_pad, "reflect", "padding") for n in (1, 2)},
    **{f"aten::replication_pad{n}d": functools.partial(_pad, "edge", "padding") for n in (1, 2)},
    "aten::_pad_circular": functools.partial(_pad, "wrap", "pad"),
    "aten::upsample_nearest2d.vec": _upsample_nearest,
    "aten::_upsample_nearest_exact2d.vec": _upsample_nearest,
    "aten::upsample_bilinear2d.vec": functools.partial(_upsample, "linear"),
    "aten::upsample_bicubic2d.vec": functools.partial(_upsample, "cubic"),
}
