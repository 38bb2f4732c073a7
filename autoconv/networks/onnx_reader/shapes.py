"""ONNX's operators that move elements, or compute with shapes, in terms of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoconv.common.types import INTEGERS, SUMS
from autoconv.networks.onnx_reader.call import NO_REAL_NUMBERS, Call, Lowering
from autoconv.networks.onnx_reader.resize import resize, upsample
from autoconv.networks.operators.base import TensorType
from autoconv.networks.operators.elementwise import FLOATS, Elementwise
from autoconv.networks.operators.shapes import Concat, Slice, Transpose
from autoconv.networks.translation import LARGEST_EXTENT, flattened


def _identity(call: Call) -> str:
    return call.value(0)


def _dropout(call: Call) -> str:
    if call.has(2) and bool(call.constant(2, "training_mode").item()):
        call.fail("training_mode: expected False")
    return call.value(0)  # the mask is refused where somebody takes it


def _cast(call: Call) -> str | None:
    from onnx import helper

    number = call.required("to")
    dtype = helper.tensor_dtype_to_np_dtype(number)
    if dtype.kind in NO_REAL_NUMBERS:
        call.fail(f"to={number}: expected the number of a type of real numbers")
    name = call.value(0)
    if name in call.graph.constants:
        if dtype.name.startswith("float8"):  # of whose types numbers may be out of range: `saturate` says what becomes
            return None
        return call.add_constant(call.graph.constants[name].astype(dtype))
    if dtype.name == call.type().dtype:
        return name
    exact = dtype == np.float32 and call.type().dtype in (*INTEGERS, *SUMS)
    return call.add(Elementwise(0, "float32"), name) if exact else None


def _constant(call: Call) -> str:
    from onnx import TensorProto, numpy_helper

    for key, value in call.attributes.items():
        if isinstance(value, TensorProto) and (found := numpy_helper.to_array(value)).dtype.kind not in NO_REAL_NUMBERS:
            return call.add_constant(found)
        if key in ("value_int", "value_ints"):
            return call.add_constant(np.asarray(value, np.int64))
        if key in ("value_float", "value_floats"):
            return call.add_constant(np.asarray(value, np.float32))
    return call.fail("expected a dense array of numbers")


def _constant_of_shape(call: Call) -> str:
    from onnx import numpy_helper

    given = call.attribute("value")
    value = np.zeros(1, np.float32) if given is None else numpy_helper.to_array(given).reshape(-1)
    if value.dtype.kind in NO_REAL_NUMBERS:
        call.fail(f"value: expected real numbers, got {value.dtype}")
    shape = tuple(int(n) for n in call.constant(0, "shape").reshape(-1))
    if min(shape, default=0) < 0:
        call.fail(f"shape={shape}: expected extents of at least 0")
    call.check_room(TensorType(shape, value.dtype.name))
    return call.graph.add_constant(call.name, np.full(shape, value[0]))


def _shape(call: Call) -> str:
    shape = call.type().shape
    return call.add_constant(np.array(shape[call.attribute("start", 0) : call.attribute("end", len(shape))], np.int64))


def _gather(call: Call) -> str | None:
    name, shape = call.value(0), call.type().shape
    data, indices = (call.graph.constants.get(call.value(n)) for n in (0, 1))
    axis = call.axis(0, len(shape))
    if indices is None:
        return None
    if data is None:
        several = indices.size != 1
        if several and (not 0 < indices.size <= LARGEST_EXTENT or call.type().dtype not in FLOATS):
            return None
        if not np.all((-shape[axis] <= indices) & (indices < shape[axis])):
            call.fail(f"indices: expected them within {shape[axis]}")
        if several:
            found = call.taken(name, axis, indices.reshape(-1))
        else:
            found = call.slice_axis(name, axis, int(indices.item()) % shape[axis], 1)
        return call.reshape(found, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))
    call.check_room(TensorType((*shape[:axis], *indices.shape, *shape[axis + 1 :]), data.dtype.name))
    try:
        return call.add_constant(np.asarray(np.take(data, indices, axis=axis)))
    except IndexError:
        return call.fail(f"indices: expected them within {data.shape[axis]}")


def _reshape(call: Call) -> str:
    old = call.type().shape
    shape = [int(n) for n in call.constant(1, "shape").reshape(-1)]
    if not call.attribute("allowzero", 0):
        if any(extent == 0 and n >= len(old) for n, extent in enumerate(shape)):
            call.fail(f"shape={shape}: 0 stands for an extent of {old}, which has fewer dimensions")
        shape = [old[n] if extent == 0 else extent for n, extent in enumerate(shape)]
    if shape.count(-1) == 1:
        known = math.prod(extent for extent in shape if extent != -1)
        if not known or math.prod(old) % known:
            call.fail(f"shape={shape}: {old} does not divide into that")
        shape[shape.index(-1)] = math.prod(old) // known
    if min(shape, default=0) < 0 or math.prod(shape) != math.prod(old):
        call.fail(f"shape={shape}: expected as many elements as {old} has")
    return call.reshape(call.value(0), shape)


def _flatten(call: Call) -> str:
    shape = call.type().shape
    axis = call.attribute("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        call.fail(f"axis={axis}: expected {-len(shape)} to {len(shape)}")
    return call.reshape(call.value(0), flattened(shape, axis if axis >= 0 else axis + len(shape)))


def _squeeze(call: Call) -> str:
    shape = call.type().shape
    given = call.integers(1, "axes")
    axes = [n for n, e in enumerate(shape) if e == 1] if given is None else call.axes(given, len(shape))
    if any(shape[n] != 1 for n in axes):
        call.fail(f"axes={axes}: expected extents of 1, got {shape}")
    return call.reshape(call.value(0), [e for n, e in enumerate(shape) if n not in axes])


def _unsqueeze(call: Call) -> str:
    shape = list(call.type().shape)
    given = call.integers(1, "axes")
    if given is None:
        call.fail("axes are missing")
    for axis in call.axes(given, len(shape) + len(given)):
        shape.insert(axis, 1)
    return call.reshape(call.value(0), shape)


def _transpose(call: Call) -> str:
    rank = len(call.type().shape)
    return call.add(Transpose(tuple(call.attribute("perm") or reversed(range(rank)))), call.value(0))


def concat(call: Call) -> str:
    """Arrays joined along an axis."""
    call.required("axis")
    values = [call.value(n) for n in range(len(call.inputs))]
    axis = call.axis(0, len(call.type().shape))
    return values[0] if len(values) == 1 else call.add(Concat(axis), *values)


def _split(call: Call) -> list[str]:
    shape = call.type().shape
    axis = call.axis(0, len(shape))
    sizes = call.integers(1, "split")
    if sizes is None:
        parts = call.attribute("num_outputs", len(call.outputs))
        if parts != len(call.outputs):
            call.fail(f"num_outputs={parts}: expected {len(call.outputs)}, as it has")
        if call.opset < 18 and shape[axis] % parts:
            call.fail(f"expected an extent that {parts} divides, as no split is given, got {shape[axis]}")
        each = -(-shape[axis] // parts)
        sizes = tuple(min(each, shape[axis] - n * each) for n in range(parts))
    if sum(sizes) != shape[axis] or len(sizes) != len(call.outputs) or min(sizes) < 1:
        call.fail(f"split={sizes}: expected {len(call.outputs)} parts of {shape[axis]} in all")
    starts = np.cumsum((0, *sizes))
    x = call.value(0)
    return [call.slice_axis(x, axis, int(start), size) for start, size in zip(starts, sizes, strict=False)]


def _slice(call: Call) -> str:
    shape = call.type().shape
    starts, ends = call.integers(1, "starts"), call.integers(2, "ends")
    if starts is None or ends is None or len(starts) != len(ends):
        call.fail(f"expected as many starts as ends, got {starts} and {ends}")
    axes = call.integers(3, "axes") or tuple(range(len(starts)))
    steps = call.integers(4, "steps") or (1,) * len(starts)
    call.axes(axes, len(shape))
    known = call.graph.constants.get(call.value(0))  # of shapes, say, of which nothing may be left
    first, counts, strides = [0] * len(shape), list(shape), [1] * len(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step == 0:
            call.fail("steps: expected any but 0")
        places = range(*slice(start, end, step).indices(shape[axis]))
        if known is not None:
            known = known.take(np.asarray(places, np.int64), axis)
        elif not places:
            call.fail(f"starts={starts}, ends={ends}: nothing is left of {shape}")
        else:
            first[axis], counts[axis], strides[axis] = places[0], len(places), step
    if known is not None:
        return call.add_constant(known)
    return call.add(Slice(tuple(first), tuple(counts), tuple(strides)), call.value(0))


def _moved(call: Call, apart: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """An array in more dimensions, in another order, and in fewer again."""
    return call.reshape(call.add(Transpose(order), call.reshape(call.value(0), apart)), shape)


def _block(call: Call) -> tuple[int, bool, tuple[int, ...]]:
    """The extent of a block of pixels, whether it lies before the channels it becomes, and the shape of the images."""
    size, mode, shape = int(call.required("blocksize")), call.attribute("mode", "DCR"), call.type().shape
    if len(shape) != 4 or size < 1:
        call.fail(f"blocksize={size}: expected at least 1, and images (N, C, H, W), got {shape}")
    if mode not in ("DCR", "CRD"):
        call.fail(f"mode={mode!r}: expected DCR or CRD")
    return size, mode == "DCR", shape


def _depth_to_space(call: Call) -> str:
    b, before, (N, C, H, W) = _block(call)
    if C % (b * b):
        call.fail(f"blocksize={b}: expected channels that {b * b} divides, got {C}")
    c = C // (b * b)
    if before:
        return _moved(call, (N, b, b, c, H, W), (0, 3, 4, 1, 5, 2), (N, c, H * b, W * b))
    return _moved(call, (N, c, b, b, H, W), (0, 1, 4, 2, 5, 3), (N, c, H * b, W * b))


def _space_to_depth(call: Call) -> str:
    b, before, (N, C, H, W) = _block(call)
    if H % b or W % b:
        call.fail(f"blocksize={b}: expected extents that it divides, got {H}x{W}")
    order = (0, 3, 5, 1, 2, 4) if before else (0, 1, 3, 5, 2, 4)
    return _moved(call, (N, C, H // b, b, W // b, b), order, (N, C * b * b, H // b, W // b))


def _repeated(call: Call, shape: tuple[int, ...], times: Sequence[int]) -> str | None:
    """An array, seen in a shape of so many dimensions, so many times along each of its axes."""
    x, known = call.value(0), call.graph.constants.get(call.value(0))
    found = tuple(extent * n for extent, n in zip(shape, times, strict=True))
    if known is not None:
        call.check_room(TensorType(found, known.dtype.name))
        return call.add_constant(np.tile(known.reshape(shape), times))
    longest = max((extent for extent, n in zip(found, times, strict=True) if n != 1), default=0)
    if min(times, default=1) < 1 or longest > LARGEST_EXTENT or call.type().dtype not in FLOATS:
        return None
    x = call.reshape(x, shape)
    for axis, n in enumerate(times):
        x = call.taken(x, axis, [*range(shape[axis])] * n)
    return x


def _expand(call: Call) -> str | None:
    old, given = call.type().shape, tuple(int(n) for n in call.constant(1, "shape").reshape(-1))
    try:
        shape = np.broadcast_shapes(old, given)
    except ValueError:
        call.fail(f"shape={given}: {old} does not broadcast to that")
    old = (*(1,) * (len(shape) - len(old)), *old)
    return _repeated(call, old, [new if extent == 1 else 1 for extent, new in zip(old, shape, strict=True)])


def _tile(call: Call) -> str | None:
    shape, times = call.type().shape, [int(n) for n in call.constant(1, "repeats").reshape(-1)]
    if len(times) != len(shape) or min(times, default=0) < 0:
        call.fail(f"repeats={times}: expected {len(shape)} numbers of at least 0")
    return _repeated(call, shape, times)


def _pad(call: Call) -> str:
    rank = len(call.type().shape)
    pads = call.integers(1, "pads")
    given = call.integers(3, "axes")
    axes = call.axes(given, rank)
    if pads is None or len(pads) != 2 * len(axes):
        call.fail(f"pads={pads}: expected {2 * len(axes)} integers")
    value = call.constant(2, "constant_value").item() if call.has(2) else float(call.attribute("value", 0.0))
    mode = call.attribute("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        call.fail(f"mode={mode!r}: expected constant, reflect, edge or wrap")
    before, after = [0] * rank, [0] * rank
    for n, axis in enumerate(axes if given is None else given):
        before[axis % rank], after[axis % rank] = pads[n], pads[n + len(axes)]
    return call.pad(call.value(0), before, after, mode, value)


LOWERINGS: dict[str, Lowering] = {
    "Cast": _cast,
    "Concat": concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Identity": _identity,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": resize,
    "Shape": _shape,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Upsample": upsample,
}
