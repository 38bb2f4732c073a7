"""The kernels of a tiled Fourier convolution: spectra of tiles times spectra of filters.

Stockham, "High-speed convolution and correlation" (1966); Mathieu, Henaff and LeCun, "Fast Training of Convolutional
Networks through FFTs" (2014).

All transforms are complex. Vertically, two neighbouring columns of real numbers are one column of complex
ones, transformed for a whole row of tiles at a time; the horizontal transforms tell them apart as they load
them. Vertical frequencies 0 and T/2 have real rows again: they, too, are transformed as one. The way back is
the mirror image. Factors of 2 that halves would cost are left to the filters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autoconv.cpu.codegen.ir import Function, Module, Value, ptr
from autoconv.cpu.codegen.launch import CONTEXT, TASK, launch
from autoconv.cpu.fft.dft import Complex, FourierTransform, get, put, times
from autoconv.cpu.fft.geometry import FourierTiling
from autoconv.cpu.transform import kernels
from autoconv.cpu.transform.filters import FilterStage
from autoconv.cpu.transform.geometry import HEADER
from autoconv.cpu.transform.input import InputStage
from autoconv.layer import ConvLayer

F = TypeVar("F", bound=FourierTiling)


def emit(instruction_set: str, layer: ConvLayer, tilings: tuple[FourierTiling, ...]) -> Module:
    """`run` and `pack` for the correlations of a layer."""
    return kernels.emit(FourierWriter, instruction_set, layer, tilings)


def columns_apart(a: Complex, b: Complex, odd: int) -> Complex:
    """Twice a column's frequency f, from f and T - f of the transform of an even column plus i times the next."""
    return Complex(a.im + b.im, b.re - a.re) if odd else Complex(a.re + b.re, a.im - b.im)


def columns_together(even: Complex, odd: Complex, mirrored: bool) -> Complex:
    """Frequency f, or T - f, of an even column plus i times the next, from their frequency f."""
    if mirrored:
        return Complex(even.re + odd.im, odd.re - even.im)
    return Complex(even.re - odd.im, even.im + odd.re)


def rows_apart(k: Function, line: Value, n: int, lanes: int, store: Callable[[Value, int, Complex], None]) -> None:
    """Twice the spectra of two real rows, transformed as one: `store(frequency, row, number)` up to n / 2."""
    with k.loop(0, n // 2 + 1) as f:
        other = k.select(f.eq(0), f, n - f)
        a, b = (get(k, line + place * (2 * lanes), lanes, lanes) for place in (f, other))
        for row in range(2):
            store(f, row, columns_apart(a, b, row))


class FourierInput(InputStage[F]):
    """Writes the spectra of the input of one correlation."""

    def transform_columns(self) -> Function:
        """Pairs of columns of a row of tiles."""
        tiling, lanes = self.tiling, self.tiling.lanes
        k = self.function("transform_columns", ptr(self.real), ptr(self.real))
        raw, half = k.args
        row = tiling.pitch * lanes
        transform = FourierTransform(k, self.real, lanes, tiling.lengths[0])
        with k.loop(0, tiling.columns.span, 2) as column:
            source, target = raw + column * lanes, half + column * lanes
            transform.write(
                lambda i, j: get(k, source + i * row + j * row, lanes, lanes),
                lambda i, j, x: put(x, target + i * row + j * row, lanes),
            )
        return k

    def transform_rows(self) -> Function:
        """Rows of vertical frequencies, tile by tile, to where the product wants them."""
        tiling, lanes = self.tiling, self.tiling.lanes
        T, n = tiling.lengths
        k = self.function("transform_rows", ptr(self.real), ptr(self.real))
        half, v = k.args
        row, apart, step = tiling.pitch * lanes, tiling.v_stride, tiling.planes * tiling.v_stride
        both = FourierTransform(k, self.real, lanes, n)
        each = FourierTransform(k, self.real, lanes, n, pairs=True) if T > 2 else both
        line = k.scratch(self.real, 2 * n * lanes)

        def store(x: Complex, p: Value) -> None:
            planes = (x.re, x.im, x.re + x.im)[: tiling.planes]
            for n, plane in enumerate(planes):
                self.keep(k, plane, p + n * apart)

        with k.loop(0, tiling.columns.tiles) as t:
            source, target = half + t * (tiling.columns.m * lanes), v + t * tiling.v_tile
            if T > 2:
                with k.loop(1, T // 2) as f:
                    up, down = source + f * row, source + (T - f) * row
                    points = target + (f - 1) * (n * step)

                    def load(i: Value, j: int) -> Complex:
                        place = i * lanes + (j - j % 2) * lanes
                        a, b = (get(k, p + place, lanes, lanes) for p in (up, down))
                        return columns_apart(a, b, j % 2)

                    each.write(load, lambda i, j, x: store(x, points + i * step + j * step))
            both.write(
                lambda i, j: get(k, source + i * lanes + j * lanes, T // 2 * row, lanes),
                lambda i, j, x: put(x, line + i * (2 * lanes) + j * (2 * lanes), lanes),
            )
            points = target + (T // 2 - 1) * n * step
            rows_apart(k, line, n, lanes, lambda f, r, x: store(x, points + (f + r * (n // 2 + 1)) * step))
        return k


class FourierFilters(FilterStage[F]):
    """Writes the spectra of the filters of one correlation, conjugated and scaled."""

    def keep(self, k: Function, x: Complex, p: Value) -> None:
        """Store a number of the spectrum in the planes that the product wants."""
        put(x, p, self.apart)

    def transform(self) -> Function:
        """The spectra of one block of filters for one channel."""
        tiling, lanes, TK = self.tiling, self.tiling.lanes, self.tiling.TK
        T, n = tiling.lengths
        R, S = (axis.r for axis in tiling.filter_axes)
        k = self.function("transform_filters", ptr(self.real), ptr(self.real))
        zero = k.zero(self.real, lanes)
        pair, line, spectrum = (k.scratch(self.real, 2 * length * lanes) for length in (T, n, n))
        width = (S + S % 2) * lanes
        half = k.scratch(self.real, T * width)
        down = FourierTransform(k, self.real, lanes, T)
        across = FourierTransform(k, self.real, lanes, n)

        def pair_of(taps: Value, column: Value, some: int) -> None:
            with k.loop(0, R) as i:
                for part in range(2):
                    tap = taps + ((i * S + column) * TK + part * TK)
                    k.store(k.load(tap, lanes) if part < some else zero, pair + (i * (2 * lanes) + part * lanes))
            target = half + column * lanes
            down.write(
                lambda i, j: get(k, pair + i * (2 * lanes) + j * (2 * lanes), lanes, lanes),
                lambda i, j, x: put(x, target + i * width + j * width, lanes),
            )

        def number(i: Value, j: int) -> Complex:
            return get(k, line + i * (2 * lanes) + j * (2 * lanes), lanes, lanes)

        for buffer, length in ((pair, T), (line, n)):
            with k.loop(0, 2 * length) as i:
                k.store(zero, buffer + i * lanes)
        with k.loop(0, tiling.vectors) as vector:
            taps, u = (p + vector * lanes for p in k.args)
            if S > 1:
                with k.loop(0, S // 2 * 2, 2) as column:
                    pair_of(taps, column, 2)
            if S % 2:
                pair_of(taps, k.i64(S - 1), 1)

            def store(place: Value, x: Complex) -> None:
                scale = 1 / (4 * T * n)
                p = u + place * (tiling.product_planes * self.apart)
                self.keep(k, Complex(x.re * scale, x.im * -scale), p)

            if T > 2:
                with k.loop(1, T // 2) as f:
                    for odd in range(min(S, 2)):
                        with k.loop(0, S - odd, 2) as column:
                            a, b = (get(k, half + row * width + column * lanes, lanes, lanes) for row in (f, T - f))
                            put(columns_apart(a, b, odd), line + (column + odd) * (2 * lanes), lanes)
                    across.write(number, lambda i, j, x: store((f - 1) * n + i + j, x))
            with k.loop(0, S) as column:
                put(get(k, half + column * lanes, T // 2 * width, lanes), line + column * (2 * lanes), lanes)
            across.write(number, lambda i, j, x: put(x, spectrum + i * (2 * lanes) + j * (2 * lanes), lanes))
            rows_apart(k, spectrum, n, lanes, lambda f, r, x: store(f + ((T // 2 - 1) * n + r * (n // 2 + 1)), x))
        return k


class FourierWriter(kernels.TransformWriter[F]):
    """Writes the functions of one correlation: the product of complex numbers, and the inverse transform."""

    input_stage = FourierInput
    filter_stage = FourierFilters

    def run_independent(self) -> Function:
        """Every thread takes chunks; where no channels are summed, a vector of channels of a chunk."""
        tiling = self.tiling
        if not tiling.channelwise:
            return super().run_independent()
        k = self.function("chunk", *TASK)
        _, index, thread = k.args
        x, u, y, bias, residual, workspace = self.operands(k)
        block = index // tiling.chunks
        first, rows = tiling.chunk_at(index % tiling.chunks)
        scratch = k.bytes_at(workspace, HEADER, self.real) + thread * tiling.thread_size
        v = scratch + tiling.scratch_size
        k.call(self.input, x, v + -block * (tiling.chunk_tiles * tiling.lanes), scratch, first, rows, 0, block)
        k.call(self.output, v, u, scratch, x, y, bias, residual, first, rows, 0, block)
        run = self.function("independent", CONTEXT)
        launch(run, run.args[0], k, tiling.tasks)
        return run

    def product_of(self, size: int) -> Function:
        """The register tile: one frequency of `size` tiles by a vector of filters, summed over channels.

        `(a + ib)(c + id)` in three real products, of which additions make the parts (Gauss). The sums a + b
        come ready from the transforms, so that every operand is a broadcast from memory. The filters of the next
        frequency are fetched meanwhile: they come in runs too short for the processor to foresee them.
        """
        tiling, lanes = self.tiling, self.tiling.lanes
        k = self.function(f"product_of_{size}_", *[ptr(self.real)] * 3)
        v, u, out = k.args
        if tiling.channelwise:
            filters = get(k, u, lanes, lanes)
            for p in range(size):
                put(times(get(k, v + p * lanes, tiling.v_stride, lanes), *filters), out + p * lanes, tiling.m_stride)
            return k
        acc = [[k.var(k.zero(self.real, lanes)) for _ in range(3)] for _ in range(size)]

        def terms(block: Value, count: int) -> None:
            source, filters = v + block * (tiling.chunk_tiles * lanes), u + block * (lanes * lanes)
            with k.loop(0, count) as channel:
                c, d = get(k, filters + channel * lanes, tiling.depth * lanes, lanes)
                for part in (2, 3):
                    k.prefetch(filters + channel * lanes + part * tiling.depth * lanes)
                difference, total = d - c, c + d
                for p in range(size):
                    place = source + channel + p * lanes
                    a, b, both = (k.broadcast(place + plane * tiling.v_stride, lanes) for plane in range(3))
                    acc[p][0].fma(both, c)
                    acc[p][1].fma(a, difference)
                    acc[p][2].fma(b, total)

        whole, rest = divmod(tiling.depth, lanes)
        if whole:
            with k.loop(0, whole) as block:
                terms(block, lanes)
        if rest:
            terms(k.i64(whole), rest)
        for p in range(size):
            first, second, third = (var.get() for var in acc[p])
            put(Complex(first - third, first + second), out + p * lanes, tiling.m_stride)
        return k

    def product(self, rows: int, split: Sequence[tuple[int, int]]) -> Function:
        tiling = self.tiling
        k = self.function(f"product_{rows}_", *[ptr(self.real)] * 3)
        v, u, out = k.args
        with k.loop(0, tiling.frequencies) as f:
            for size, tile, _ in kernels.each_register_tile(k, split):
                source = v + (f * (tiling.planes * tiling.v_stride) + tile * tiling.lanes)
                target = out + (f * (2 * tiling.m_stride) + tile * tiling.lanes)
                k.call(self.registers[size], source, u + f * (2 * tiling.depth * tiling.lanes), target)
        return k

    def product_at(self, k: Function, p: Value) -> Complex:
        """A number of the products."""
        return get(k, p, self.tiling.m_stride, self.tiling.lanes)

    def inverse_transform(self) -> Function:
        tiling, lanes = self.tiling, self.tiling.lanes
        T, n = tiling.lengths
        k = self.function("inverse", ptr(self.real), ptr(self.real))
        products, strip = k.args
        pitch, step = tiling.out_pitch * lanes, tiling.product_planes * tiling.m_stride
        half, row = strip + tiling.rows.m * pitch, tiling.kept * (2 * lanes)
        zero = k.zero(self.real, lanes)
        each = FourierTransform(k, self.real, lanes, n) if T > 2 else None
        both = FourierTransform(k, self.real, lanes, n, fold=True)
        down = FourierTransform(k, self.real, lanes, T, fold=True)

        def keep(transform: FourierTransform, i: Value, j: int, limit: int, store: Callable[[], None]) -> None:
            """Store what lies below the limit."""
            if j + transform.a <= limit:
                store()
            elif j < limit:
                with k.if_(i + j < limit):
                    store()

        with k.loop(0, tiling.columns.tiles) as t:
            source, target = products + t * tiling.m_tile, strip + t * (tiling.columns.m * lanes)
            if each is not None:
                with k.loop(1, T // 2) as f:
                    points, line = source + (f - 1) * (n * step), half + f * row

                    def store_row(i: Value, j: int, x: Complex) -> None:
                        place = line + i * (2 * lanes) + j * (2 * lanes)
                        keep(each, i, j, tiling.kept, lambda: put(x.swapped, place, lanes))

                    each.write(lambda i, j: self.product_at(k, points + i * step + j * step).swapped, store_row)
            points = source + (T // 2 - 1) * n * step

            def load_both(i: Value, j: int) -> Complex:
                mirrored = j >= n // 2
                place = points + (n - j - i if mirrored else i + j) * step
                first, last = (self.product_at(k, place + r * ((n // 2 + 1) * step)) for r in range(2))
                return columns_together(first, last, mirrored).swapped

            def store_both(i: Value, j: int, x: Complex) -> None:
                def store() -> None:
                    for place, part in ((half, x.im), (half + T // 2 * row, x.re)):
                        put(Complex(part, zero), place + i * (2 * lanes) + j * (2 * lanes), lanes)

                keep(both, i, j, tiling.kept, store)

            both.write(load_both, store_both)
            with k.loop(0, tiling.kept, 2) as column:

                def load_column(i: Value, j: int) -> Complex:
                    mirrored = j >= T // 2
                    place = half + column * (2 * lanes) + (T - j - i if mirrored else i + j) * row
                    even, odd = (get(k, place + c * (2 * lanes), lanes, lanes) for c in range(2))
                    return columns_together(even, odd, mirrored).swapped

                def store_column(i: Value, j: int, x: Complex) -> None:
                    place = target + column * lanes + i * pitch + j * pitch
                    keep(down, i, j, tiling.rows.m, lambda: put(x.swapped, place, lanes))

                down.write(load_column, store_column)
        return k
