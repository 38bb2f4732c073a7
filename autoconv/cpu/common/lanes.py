"""Lanes of vectors: parts of a vector in memory, what falls inside an image, interleaving and its inverse.

The last two are written twice: by concatenating the vectors first, which shuffles vectors wider than a register, and
by taking one vector after the other. The kernels were measured with the one that each uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoconv.cpu.codegen.ir import Function, Value, i32, widened


def load_range(k: Function, p: Value, lanes: int, low: int, high: int) -> Value:
    """Lanes low .. high - 1 of the vector at `p`; the others are not touched and hold anything."""
    if (low, high) == (0, lanes):
        return k.load(p, lanes)
    if k.module.instruction_set == "avx512":
        return k.load(p, lanes, mask=k.mask(high, lanes, low))
    element = p.type.to
    assert element is not None
    v = k.zero(widened(element), lanes)
    for lane in range(low, high):
        v = k.insert(v, k.load(p + lane), lane)
    return v


def store_range(k: Function, v: Value, p: Value, low: int, high: int) -> None:
    """Store lanes low .. high - 1 of a vector whose lane 0 belongs at `p`.

    Without AVX-512 in parts of 2**n lanes: AVX2's masked stores are slow on some processors. A single lane is stored as
    such: LLVM finds that by itself of a constant mask, but takes minutes over some hundreds of them in one block.
    """
    lanes = v.type.lanes
    if (low, high) == (0, lanes):
        k.store(v, p)
    elif high == low + 1:
        k.store(k.extract(v, low), p + low)
    elif k.module.instruction_set == "avx512":
        k.store(v, p, mask=k.mask(high, lanes, low))
    else:
        while low < high:
            n = 1 << (high - low).bit_length() - 1
            part = k.extract(v, low) if n == 1 else k.shuffle(v, v, range(low, low + n))
            k.store(part, p + low)
            low += n


def within(k: Function, first: Value, lanes: int, limit: Value) -> Value:
    """The lanes l with `0 <= first + l < limit`, as a mask."""
    if lanes == 1:
        return (first >= 0) & (first < limit)
    place = k.iota(i32, lanes) + k.splat(k.cast(first, i32), lanes)
    return (place >= 0) & (place < k.splat(k.cast(limit, i32), lanes))


def store_transposed(k: Function, rows: Sequence[Value], p: Value, length: int, apart: int) -> None:
    """Store `length` elements of as many rows as a vector has lanes, column by column so far apart."""
    lanes = len(rows)

    def block(start: int | Value, width: int) -> None:
        vectors = [load_range(k, row + start, lanes, 0, width) for row in rows]
        for n, v in enumerate(k.transpose(vectors)[:width]):
            k.store(v, p + start * apart + n * apart)

    whole = length // lanes * lanes
    if whole:
        with k.loop(0, whole, lanes) as start:
            block(start, lanes)
    if whole < length:
        block(whole, length - whole)


def overlap(k: Function, start: Value, step: int, size: int, count: int) -> tuple[Value, Value]:
    """Of n from 0 to count - 1, the first with `0 <= start + n * step < size`, and the one after the last."""
    low = k.max(step - 1 - start, 0) // step
    high = k.max(step - 1 + size - start, 0) // step
    return low, k.min(high, count)


def every_nth(k: Function, vectors: Sequence[Value | None], lanes: int) -> Value:
    """Of n vectors that follow one another, every n-th lane: `deinterleaved` by shuffles of two such vectors.

    What comes from one that is None, as the first never is, may be anything. The result lies behind an arithmetic
    fence.
    """
    n = len(vectors)
    v = vectors[0]
    assert v is not None
    if n == 1:
        return v
    there = [(q, vector) for q, vector in enumerate(vectors) if vector is not None]
    kept = [lane * n if lane * n < lanes else 0 for lane in range(lanes)]  # of the first; in the end lane by lane
    for q, vector in there[1:] or there:
        picks = list(kept)
        for lane in range(lanes):
            number, place = divmod(lane * n, lanes)
            if number == q:
                picks[lane] = lanes + place
            elif number > q:
                picks[lane] = 0
        v, kept = k.shuffle(v, vector, picks), list(range(lanes))
    return k.arithmetic_fence(v)


def deinterleaved(k: Function, vectors: Sequence[Value], stride: int, residue: int) -> Value:
    """Lanes residue, residue + stride, ... of `stride` vectors taken as one."""
    lanes = vectors[0].type.lanes
    return _picked(k, vectors, range(residue, stride * lanes, stride)) if stride > 1 else vectors[0]


def halved(k: Function, vectors: Sequence[Value], stride: int, residue: int) -> Value:
    """What `deinterleaved` gives, its lanes in an order that `in_order` puts right: quicker for sums of several such.

    The shuffles of AVX2 that take two vectors keep to their halves of 16 bytes. Every second lane of two vectors is one
    of these, and another instruction, of half the rate on some processors, that brings quarters into order.
    """
    lanes = vectors[0].type.lanes
    if not by_halves(k, lanes, stride):
        return deinterleaved(k, vectors, stride, residue)
    places = range(residue, stride * lanes, stride)
    return k.shuffle(vectors[0], vectors[1], [places[lane] for lane in _quarters(lanes)])


def in_order(k: Function, v: Value, stride: int) -> Value:
    """A vector that was made of what `halved` gives, lane by lane, as made of what `deinterleaved` gives."""
    lanes = v.type.lanes
    return k.shuffle(v, v, _quarters(lanes)) if by_halves(k, lanes, stride) else v


def by_halves(k: Function, lanes: int, stride: int) -> bool:
    """Whether `halved` gives lanes in another order."""
    return stride == 2 and lanes % 4 == 0 and k.module.instruction_set == "avx2"


def _quarters(lanes: int) -> list[int]:
    """The lanes of a vector whose second and third quarters are exchanged."""
    quarter = lanes // 4
    return [part * quarter + n for part in (0, 2, 1, 3) for n in range(quarter)]


def interleaved(k: Function, vectors: Sequence[Value]) -> list[Value]:
    """Lane 0 of every vector, then lane 1 of every one, and so on, as that many vectors."""
    lanes, count = vectors[0].type.lanes, len(vectors)
    places = [n * lanes + lane for lane in range(lanes) for n in range(count)]
    return [_picked(k, vectors, places[n * lanes : (n + 1) * lanes]) for n in range(count)]


def _picked(k: Function, vectors: Sequence[Value], places: Sequence[int]) -> Value:
    """Lanes of vectors taken as one."""
    while len(vectors) > 2:
        pairs = [(vectors[n], vectors[min(n + 1, len(vectors) - 1)]) for n in range(0, len(vectors), 2)]
        vectors = [k.shuffle(a, b, range(2 * a.type.lanes)) for a, b in pairs]
    return k.shuffle(vectors[0], vectors[-1], places)


def interleaved_in_turn(k: Function, vectors: Sequence[Value]) -> list[Value]:
    """What `interleaved` gives, by shuffles of two vectors as long as those given, one vector after the other."""
    n, lanes = len(vectors), vectors[0].type.lanes
    found = []
    for part in range(n):
        v = vectors[0]
        picks = [(part * lanes + lane) // n for lane in range(lanes)]
        sources = [(part * lanes + lane) % n for lane in range(lanes)]
        done = [picks[lane] if sources[lane] == 0 else 0 for lane in range(lanes)]
        for q in range(1, n):
            choose = [
                lanes + picks[lane] if sources[lane] == q else (done[lane] if q == 1 else lane) for lane in range(lanes)
            ]
            v = k.shuffle(v, vectors[q], choose)
        found.append(v)
    return found
