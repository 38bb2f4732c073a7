"""The kernels that measure a machine: each does one thing over and over, and is timed from outside.

Where memory is moved, every thread has a range of operand `a` (or of `out`) to itself. The numbers that a probe runs by
are in operand `b`: threads, elements of a thread's range, and rounds.
"""

from __future__ import annotations

from collections.abc import Callable

from autoconv.cpu.codegen.ir import DTYPES, LINE, Function, Module, Type, Value, f32, i32, i64, vec
from autoconv.cpu.codegen.launch import RUN, TASK, TEAM_TASK, launch, launch_team, operands
from autoconv.cpu.codegen.tiles import TILE_BYTES, TILE_ROW_BYTES
from autoconv.cpu.codegen.words import add_products

ROUNDS = 50_000  # of multiply-adds in a run
CHAINS = 12  # independent sums: more than a multiply-add's latency times the units that do them
FACTOR = -1e-5  # sums shrink by it every round, and neither vanish nor overflow
STREAMS = 8  # vectors read or written in one round of a loop; also the points of a transformed tile
PEAK, READ, WRITE, STREAM, CHASE, JUMP, HAND = "peak", "read", "write", "stream", "chase", "jump", "hand"
TRANSFORM, NOTHING, TILES, WORDS = "transform", "nothing", "tiles", "words"
SUMS = 4  # tiles of sums, each the product of one of two tiles by one of two others
JUMPS = 4  # series of places that a thread jumps to in turn
FACTOR_64, TERM_64 = 6364136223846793005, 1442695040888963407  # Knuth's MMIX: every number of 64 bits comes in turn


def emit_peak(instruction_set: str, dtype: str) -> Module:
    """Every thread runs `ROUNDS` rounds of `CHAINS` fused multiply-adds, and writes what came of it."""
    m = Module(instruction_set)
    element = DTYPES[dtype]
    lanes = m.lanes(element)
    k, thread, (a, _, out) = _task(m, PEAK, element)
    factor = k.load(a, lanes)
    sums = [k.var(factor * (n + 1)) for n in range(CHAINS)]
    with k.loop(0, ROUNDS):
        for chain in sums:
            chain.fma(chain.get(), factor)
    total = sums[0].get()
    for chain in sums[1:]:
        total = total + chain.get()
    k.store(total, out + thread * lanes)
    _run(m, PEAK)
    return m


def emit_words(instruction_set: str, product: str) -> Module:
    """Every thread runs `ROUNDS` rounds of `CHAINS` products of words, each of the sum so far and the words of `a`."""
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    k, thread, (a, _, out) = _task(m, WORDS, i32)
    factor = k.load(a, lanes)
    sums = [k.var(factor + n) for n in range(CHAINS)]
    with k.loop(0, ROUNDS):
        for chain in sums:
            chain.set(add_products(k, product, chain.get(), chain.get(), factor))
    total = sums[0].get()
    for chain in sums[1:]:
        total = total ^ chain.get()
    k.store(total, out + thread * lanes)
    _run(m, WORDS)
    return m


def emit_tiles(instruction_set: str, matrix_unit: str, dtype: str) -> Module:
    """Every thread multiplies the tile of operand `a` by itself, `SUMS` products a round, of bfloat16 or int8."""
    m = Module(instruction_set, matrix_unit=matrix_unit)
    k, thread, (a, b, out) = _task(m, TILES, f32)
    k.configure_tiles()
    for tile in range(SUMS):
        k.tile_zero(tile)
    for tile in range(SUMS, 2 * SUMS):
        k.tile_load(tile, a, TILE_ROW_BYTES)
    with k.loop(0, k.load(b + 2)):
        for tile in range(SUMS):
            multiply = k.tile_multiply if dtype == "bfloat16" else k.tile_multiply_bytes
            multiply(tile, SUMS + tile % 2, SUMS + 2 + tile // 2)
    k.tile_store(0, out + thread * (TILE_BYTES // 4), TILE_ROW_BYTES)
    k.release_tiles()
    _run(m, TILES)
    return m


def emit(instruction_set: str) -> Module:
    """Reading, writing, handing on, following a chain, jumping, transforming, nothing, by functions of those names."""
    m = Module(instruction_set)
    lanes = m.lanes(f32)
    _emit_read(m, lanes)
    _emit_write(m, WRITE, lanes, nontemporal=False)
    _emit_write(m, STREAM, lanes, nontemporal=True)
    _emit_hand(m, lanes)
    _emit_chase(m)
    _emit_jump(m)
    _emit_transform(m, lanes)
    _task(m, NOTHING, f32)
    _run(m, NOTHING)
    return m


def _emit_read(m: Module, lanes: int) -> None:
    """Every thread reads its range, round after round."""
    k, thread, (a, b, out) = _task(m, READ, i32)
    _read(k, lanes, out + thread * lanes, lambda step: _over_range(k, a, b, thread, lanes, step))
    _run(m, READ)


def _read(k: Function, lanes: int, total: Value, through: Callable[[Callable[[Value], None]], None]) -> None:
    """Vectors are merged bit by bit, which takes less than to load them; they come in order, as kernels stream."""
    merged = [k.var(k.const(vec(i32, lanes), 0)) for _ in range(STREAMS)]

    def step(start: Value) -> None:
        for n, one in enumerate(merged):
            one.set(one.get() | k.load(start + n * lanes, lanes, ordered=True))

    through(step)
    found = merged[0].get()
    for one in merged[1:]:
        found = found | one.get()
    k.store(found, total)


def _emit_write(m: Module, name: str, lanes: int, nontemporal: bool) -> None:
    """Every thread writes its range, round after round."""
    k, thread, (_, b, out) = _task(m, name, f32)
    one = k.const(vec(f32, lanes), 1.0)
    _over_range(k, out, b, thread, lanes, lambda start: _write(k, one, start, nontemporal))
    if nontemporal:
        k.fence()
    _run(m, name)


def _write(k: Function, vector: Value, start: Value, nontemporal: bool = False) -> None:
    """Anything but zeros, which some processors write to memory at three times the rate of the rest."""
    for n in range(STREAMS):
        k.store(vector, start + n * vector.type.lanes, nontemporal=nontemporal)


def _emit_hand(m: Module, lanes: int) -> None:
    """In two regions a round, every thread writes its range of `a` and then reads the next one's, the last the first's.

    What is written tells whose it is: a thread's number, counted from 1. Without elements only the regions are left.
    """
    put = m.function("put", *TEAM_TASK, internal=True)
    context, thread, _ = put.args
    a, b, _ = operands(put, context, f32, i64, f32)[:3]
    number, step = put.load(b + 1), STREAMS * lanes
    own = put.splat(put.cast(thread + 1, f32), lanes)
    with put.loop(0, number, step) as i:
        _write(put, own, a + thread * number + i)
    get = m.function("get", *TEAM_TASK, internal=True)
    context, thread, threads = get.args
    a, b, out = operands(get, context, i32, i64, i32)[:3]
    number = get.load(b + 1)
    source = a + (thread + 1) % threads * number

    def through(step_at: Callable[[Value], None]) -> None:
        with get.loop(0, number, step) as i:
            step_at(source + i)

    _read(get, lanes, out + thread * lanes, through)
    k = m.function(HAND, *RUN)
    (context,) = k.args
    _, b, _ = operands(k, context, f32, i64, f32)[:3]
    with k.loop(0, k.load(b + 2)):
        launch_team(k, context, put)
        launch_team(k, context, get)


def _emit_chase(m: Module) -> None:
    """From number to number, each the place of the next: nothing can be fetched ahead, so that latency shows.

    It goes on where the last run ended, since what that one saw is in a cache now.
    """
    k, thread, (a, b, out) = _task(m, CHASE, i64)
    place = k.var(k.load(out + thread))
    with k.loop(0, k.load(b + 2)):
        place.set(k.load(a + place.get()))
    k.store(place.get(), out + thread)
    _run(m, CHASE)


def _emit_jump(m: Module) -> None:
    """From line to line of a thread's range, in no order: nothing foresees the next, and no load waits for another.

    The places are drawn by linear congruential generators (Knuth, "The Art of Computer Programming", 3.2.1), of whose
    upper halves a range of 2**n numbers takes the lowest bits, for the loads to be what takes the time. They go on
    where the last run ended: `out` has a state of each, and then what was seen.
    """
    k, thread, (a, b, out) = _task(m, JUMP, i64)
    number = k.load(b + 1)
    source, states = a + thread * number, out + thread * (2 * JUMPS)
    series = [k.var(k.load(states + n)) for n in range(JUMPS)]
    seen = k.var(k.const(i64, 0))
    with k.loop(0, k.load(b + 2), JUMPS):
        for state in series:
            state.set(state.get() * FACTOR_64 + TERM_64)
            seen.set(seen.get() | k.load(source + ((state.get() >> 32) & (number - LINE // i64.bytes))))
    for n, state in enumerate(series):
        k.store(state.get(), states + n)
    k.store(seen.get(), states + JUMPS)
    _run(m, JUMP)


def _emit_transform(m: Module, lanes: int) -> None:
    """Tiles of a Winograd or Fourier transform on one axis: sums and differences of vectors, stored point by point.

    A tile's points are neighbours where they are read, and lie an eighth of the range apart where they are written.
    """
    k, thread, (a, b, out) = _task(m, TRANSFORM, f32)
    number = k.load(b + 1)
    source, target = a + thread * number, out + thread * number
    apart = number // STREAMS
    with k.loop(0, k.load(b + 2)), k.loop(0, apart, lanes) as i:
        x = [k.load(source + i * STREAMS + n * lanes, lanes) for n in range(STREAMS)]
        for distance in (1, 2, 4):
            weight = k.const(vec(f32, lanes), 0.25 * distance)
            for n in range(STREAMS):
                if not n & distance:
                    low, high = x[n], x[n | distance]
                    x[n], x[n | distance] = k.fma(high, weight, low), k.fma(low, weight, -high)
        for n in range(STREAMS):
            k.store(x[n], target + i + apart * n)
    _run(m, TRANSFORM)


def _task(m: Module, name: str, element: Type) -> tuple[Function, Value, list[Value]]:
    """A task, its thread's number, and the operands a, b (of i64) and out."""
    k = m.function(f"{name}_task", *TASK, internal=True)
    context, _, thread = k.args
    return k, thread, operands(k, context, element, i64, element)[:3]


def _over_range(k: Function, p: Value, b: Value, thread: Value, lanes: int, step: Callable[[Value], None]) -> None:
    """Round after round, `step` at every `STREAMS` vectors of a thread's range."""
    number = k.load(b + 1)
    with k.loop(0, k.load(b + 2)), k.loop(0, number, STREAMS * lanes) as i:
        step(p + thread * number + i)


def _run(m: Module, name: str) -> None:
    """What launches a probe's task, on as many threads as there are to be."""
    task = next(function for function in m.functions if function.name == f"{name}_task")
    k = m.function(name, *RUN)
    (context,) = k.args
    _, b, _ = operands(k, context, f32, i64, f32)[:3]
    launch(k, context, task, k.load(b))
