"""Pooling of images whose channels come last: channels in vectors, and for each the places of a window in turn."""

from __future__ import annotations

from autoconv.cpu.codegen.ir import Function, Module, Type, Value, f32, f64, vec
from autoconv.cpu.codegen.launch import RUN, TASK, launch, operands
from autoconv.cpu.common.lanes import overlap
from autoconv.cpu.operators import TASK_ELEMENTS
from autoconv.cpu.operators.elements import joined, neutral
from autoconv.cpu.operators.windows import PoolShape

VECTORS = 4  # of channels at a time


def emit(instruction_set: str, pool: PoolShape, channels: int) -> Module:
    """`run` that pools a to out, both of so many channels; the shape's planes are those of all images.

    Means of whole images are rounded once, as those of rows are.
    """
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    wide = VECTORS * lanes
    whole, tail = divmod(channels, wide)
    chunks = whole + (tail > 0)
    (P, Q), (height, width) = pool.out, pool.size
    rows = pool.planes // channels * P
    together = max(1, TASK_ELEMENTS // (Q * pool.window[0] * pool.window[1] * min(wide, channels)))
    k = m.function("task", *TASK, internal=True)
    context, index, _ = k.args
    x, _, out = operands(k, context, f32)[:3]
    scales, element = [], f32
    if pool.reduction == "mean":
        element = f64 if pool.window == pool.size else f32
        scales = [m.table(k, element, [1 / count for count in pool.counts(axis)]) for axis in (0, 1)]
    with k.loop(index * together, k.min((index + 1) * together, rows * chunks)) as unit:
        row, chunk = unit // chunks, unit % chunks
        image, p = row // P, row % P
        with k.loop(0, Q) as q:
            scale = k.load(scales[0] + p) * k.load(scales[1] + q) if scales else None
            window = _Window(k, pool, channels, p, q, scale, element)
            source = x + image * (height * width * channels) + chunk * wide
            target = out + (row * Q + q) * channels + chunk * wide
            if whole:
                with k.if_(chunk < whole):
                    window.write(source, target, VECTORS, lanes)
            if tail:
                with k.if_(chunk.eq(whole)):
                    if tail >= lanes:
                        window.write(source, target, tail // lanes, lanes)
                    if tail % lanes:
                        with k.loop(tail // lanes * lanes, tail) as c:
                            window.write(source + c, target + c, 1, 1)
    run = m.function("run", *RUN)
    launch(run, run.args[0], k, -(-rows * chunks // together))
    return m


class _Window:
    """The window of one output: which of its places lie inside the image."""

    def __init__(
        self, k: Function, pool: PoolShape, channels: int, p: Value, q: Value, scale: Value | None, element: Type
    ) -> None:
        self.k, self.pool, self.channels, self.scale, self.element = k, pool, channels, scale, element
        self.rows, self.columns = (self._inside(axis, at) for axis, at in enumerate((p, q)))

    def _inside(self, axis: int, at: Value) -> tuple[Value, Value, Value]:
        """Where the window begins, and the first tap inside the image and the one behind the last."""
        k, pool = self.k, self.pool
        start = at * pool.stride[axis] - pool.padding[axis][0]
        return start, *overlap(k, start, pool.dilation[axis], pool.size[axis], pool.window[axis])

    def write(self, source: Value, target: Value, vectors: int, lanes: int) -> None:
        """So many vectors of channels of the output."""
        k, pool = self.k, self.pool
        (top, first_row, last_row), (left, first_column, last_column) = self.rows, self.columns
        totals = [k.var(k.const(vec(self.element, lanes), neutral(pool.reduction))) for _ in range(vectors)]
        with k.loop(first_row, last_row) as r, k.loop(first_column, last_column) as s:
            pixel = (top + r * pool.dilation[0]) * pool.size[1] + left + s * pool.dilation[1]
            for n, total in enumerate(totals):
                loaded = k.load(source + pixel * self.channels + n * lanes, lanes)
                total.set(joined(k, pool.reduction, total.get(), k.cast(loaded, vec(self.element, lanes))))
        for n, total in enumerate(totals):
            found = total.get() if self.scale is None else total.get() * k.splat(self.scale, lanes)
            k.store(k.cast(found, vec(f32, lanes)), target + n * lanes)
