"""Long sums as sums of sums: all products of many channels added one after the other would err more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from autoconv.cpu.codegen.ir import Function, Value, Var

# Products added one after the other; at half as many, adding up their sums starts to take time.
SUM_TERMS = 512
WINOGRAD_TERMS = 128  # of the points of tiles, whose errors the inverse transform makes larger
FINER_TERMS = 32  # of those where less error is worth a little time


def channels_of_sum(taps: int, multiple: int = 1) -> int:
    """Channels whose products with so many taps are added one after the other.

    Parameters
    ----------
    taps : int
        Products of a channel.
    multiple : int
        Channels of one round of a loop, which stay together.

    Returns
    -------
    int
    """
    return max(1, SUM_TERMS // max(1, taps * multiple)) * multiple


def sums_of(channels: int, each: int) -> int:
    """How many sums of so many channels each add up to that of all of them; the last one has what is left over.

    Parameters
    ----------
    channels, each : int

    Returns
    -------
    int
    """
    return max(1, channels // each)


@contextmanager
def each_sum(k: Function, channels: Value, most: int, each: int) -> Iterator[tuple[Value, Value]]:
    """The channels, at most so many, of one such sum after the other: the first one, and the one after the last."""
    if sums_of(most, each) == 1:
        yield k.i64(0), channels
        return
    sums = k.max(channels // each, 1)
    with k.loop(0, sums) as n:
        yield n * each, k.select(n.eq(sums - 1), channels, (n + 1) * each)


@contextmanager
def kept_aside(k: Function, sums: Sequence[Var], lanes: int) -> Iterator[Callable[[], None]]:
    """What adds the sums in registers to those before, and has them begin anew; in the end they are all there is."""
    element = sums[0].get().type.scalar
    zero, kept = k.zero(element, lanes), k.scratch(element, len(sums) * lanes)
    places = [kept + number * lanes for number in range(len(sums))]
    for place in places:
        k.store(zero, place)

    def keep() -> None:
        for total, place in zip(sums, places, strict=True):
            k.store(k.load(place, lanes) + total.get(), place)
            total.set(zero)

    yield keep
    for total, place in zip(sums, places, strict=True):
        total.set(k.load(place, lanes))
