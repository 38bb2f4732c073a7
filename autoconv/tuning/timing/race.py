"""How candidates are timed against each other: the arithmetic, on whatever clock the device has."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from autoconv.algorithm import Candidate
from autoconv.records.failures import starved, unreached
from autoconv.tuning.timing.contestant import Contestant, Timing

FEWEST, MOST = 3, 25  # samples of one contestant; the most are for those close to the best
STEADY, SETTLED = 5, 0.02  # samples, and their spread, that end the race
# Successive halving: with so many samples, one within this factor of the best may still win; the field grows smaller
# while its samples double.
CLOSE = ((STEADY, 1.25), (2 * STEADY, 1.12), (MOST, 1.06))
TWICE, CLEARLY = 2.0, 4.0  # slower than a rival by this much: drop at the second, at the first sample
PLAY_OFF = 2  # of those that a small budget lets run but once, so many are run again
FAIR_SHARE = 0.3  # seconds after which a contestant is content with the fewest samples
PATIENCE = 0.1  # seconds of warm-up after which one that is clearly slower is not probed
FAR = 20.0  # slower than the best by this much: after that warm-up no more is asked, whatever limits may leave it
IDLE = 0.005  # seconds in which a process whose threads are all asleep uses next to no processor time
LONGEST_SPIN = 0.25  # seconds to wait for that

OnEvent = Callable[[Candidate, int, int], None]


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range, relative to the median; 0 for a single sample.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.3333333333333333
    """
    if len(samples) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / 2 / middle


def wait_until_idle(sleep: Callable[[float], None] = time.sleep, busy: Callable[[], float] = time.process_time) -> None:
    """Wait until no thread of this process spins any more.

    Threads of other libraries do when their work is done: OpenBLAS's for 110 ms, ONNX Runtime's for 56 ms, as
    measured with NumPy 2.4 and ONNX Runtime 1.31. Whatever runs meanwhile has fewer processors.
    """
    for _ in range(round(LONGEST_SPIN / IDLE)):
        before = busy()
        sleep(IDLE)
        if busy() - before < IDLE / 4:
            return


@dataclass(eq=False)
class _Standing:
    """How a contestant stands so far."""

    contestant: Contestant
    warm_up: float = inf  # seconds that it took
    cold: list[float] = field(default_factory=list)
    hot: list[float] = field(default_factory=list)
    pack: list[float] = field(default_factory=list)
    spent: float = 0.0
    failure: str | None = None
    retired: bool = False
    long: bool = False  # whether its warm-up took more than its part of the budget
    final: bool = False  # whether it races in the final, where its median counts
    before: int = 0  # samples from before the heat, or the final, that goes on
    slow: float = 1.0  # how many times as long as at best the pacemaker took in the heats that it ran in
    earlier: float = 1.0  # the same when the present heat began

    @property
    def samples(self) -> list[float]:
        """Those of the heat, or the final, that goes on."""
        return self.cold[self.before :]

    @property
    def close(self) -> float:
        """The factor by which it may be slower than the best and yet win."""
        return next((factor for samples, factor in CLOSE if len(self.samples) < samples), CLOSE[-1][1])

    @property
    def alive(self) -> bool:
        return self.failure is None and self.warm_up < inf

    @property
    def doubtful(self) -> bool:
        """Whether its only sample took so much longer than its warm-up that something else may have disturbed it."""
        return len(self.cold) == 1 and self.cold[0] > TWICE * self.warm_up

    @property
    def least(self) -> float:
        if self.long and len(self.cold) < FEWEST:  # of so few even the warm-up counts
            return min([self.warm_up, *self.cold])
        return min(self.cold, default=self.warm_up)

    @property
    def time(self) -> float:
        return statistics.median(self.samples) if self.final else self.least

    @property
    def cost(self) -> float:
        return self.time + min(self.pack, default=0.0)

    @property
    def fair_time(self) -> float:
        return self.time / self.slow

    @property
    def fair_cost(self) -> float:
        return self.fair_time + min(self.pack, default=0.0)

    @property
    def settled(self) -> bool:
        if self.spent >= FAIR_SHARE:
            return len(self.samples) >= FEWEST
        return len(self.samples) >= MOST or (len(self.samples) >= STEADY and spread(self.samples) <= SETTLED)


class Heat:
    """A race that contestants may enter some at a time.

    Who enters gets a short timing: each is warmed up and probed, in the order given. Whoever is dominated, that is,
    at most half as fast as a rival in run time and in run and pack time, and no better in any other respect, is
    dropped after one or two samples, of which one that took twice as long as the warm-up is not enough; who takes
    long and is far behind the best is not run again. The rest take `FEWEST` samples in rounds, in an order that is
    shuffled anew for every round, so that a drifting clock favours nobody; whoever was best before runs with them
    and makes the pace: newcomers are held against what it takes now, and those before them against what it took
    then. Those that can no longer win retire. In the end, those left race in the final: in rounds of which all are
    part, until all who may win yet have settled, or `MOST` or their fair share of time is reached.

    In a heat the least sample is a contestant's time: whatever disturbs makes slower. In the final it is the median, as
    the least of many is that of a run which found by luck in a cache what is not there as a rule. What other processes
    do lasts for seconds, and one that retired in a quiet one must not be taken for quicker than all who raced on: the
    times of those that retired are stated at the final's pace, as the least median is to the least sample.

    Where a budget is too small for two runs of everyone, all are warmed up first, and that counts. Then the quickest
    are run again, two of them in any case: one run is no reason to prefer either.

    Parameters
    ----------
    budget : float, optional
        Seconds for all turns; what passes between `enter` and `finish` does not count.
    clock, sleep, busy : callable
        The time, waiting, and the processor time that this process has used, in seconds.
    on_event : callable, optional
        Called with a candidate before its turn, and with how many of how many have finished.
    ready : callable, optional
        Waits until the device is at its full speed, and gives the seconds that this took; they do not count either.
    """

    def __init__(
        self,
        budget: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        busy: Callable[[], float] = time.process_time,
        on_event: OnEvent | None = None,
        ready: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.budget, self.clock, self.sleep, self.busy, self.on_event = budget, clock, sleep, busy, on_event
        self.ready = ready
        self.entries: list[_Standing] = []
        self.spent, self.start = 0.0, clock()
        self.heats = 0
        self.pool: str | None = None
        self.order = random.Random(0)  # the same in every process

    def enter(self, contestants: Sequence[Contestant]) -> dict[Candidate, Timing | str]:
        """Give contestants their short timings.

        Parameters
        ----------
        contestants : sequence of Contestant

        Returns
        -------
        dict of Candidate to Timing or str
            For each its timing so far, or the reason why there is none.
        """
        self.start = self.clock()
        self.heats += 1
        entered, pacemaker = [_Standing(c) for c in contestants], self.pacemaker()
        first = len(self.entries)
        self.entries += entered
        while self.round(pacemaker, 1):
            pass
        self.hold(entered, pacemaker)
        part = inf if self.budget is None else (self.budget - self.spent) / (2 * max(len(entered), 1))
        for done, entry in enumerate(entered, first):
            if self.over():
                entry.failure = unreached(f"the budget of {self.budget:g} s was spent")
                continue
            self.turn(entry, done, lambda entry: self.warm_up(entry, part))
        self.look_again([entry for entry in entered if entry.alive and entry.long])
        while self.round([*entered, *pacemaker], FEWEST):
            pass
        self.hold(entered, pacemaker)
        contenders = self.contenders()
        for entry in self.entries:
            if entry not in contenders:
                entry.contestant = entry.contestant.retired()
                entry.retired = True
        self.spent += self.clock() - self.start
        return {entry.contestant.candidate: self.result(entry) for entry in entered}

    def finish(self) -> dict[Candidate, Timing | str]:
        """Let those that may win race to the end.

        Returns
        -------
        dict of Candidate to Timing or str
            For everyone who entered, the timing, or the reason why there is none.
        """
        self.start = self.clock()
        finalists = [entry for entry in self.entries if entry.alive and not entry.retired]
        for entry in finalists:
            entry.before = len(entry.cold) if self.heats > 1 else 0  # in different heats it was not the same race
        while self.round(finalists, FEWEST):
            pass
        if not self.over():  # else some of them may have had fewer turns
            finalists = [entry for entry in finalists if entry.alive and len(entry.samples) >= FEWEST]
            for entry in finalists:
                entry.final, entry.slow = True, 1.0
            while self.round(finalists, MOST):
                pass
            self.keep_pace([entry for entry in finalists if entry.alive])
        self.spent += self.clock() - self.start
        return {entry.contestant.candidate: self.result(entry) for entry in self.entries}

    def pacemaker(self) -> list[_Standing]:
        """Whoever is best so far, for a heat that begins; nobody in the first."""
        racing = [entry for entry in self.entries if entry.alive and not entry.retired]
        best = sorted(racing, key=lambda entry: entry.time)[:1]
        for entry in racing:
            entry.earlier = entry.slow
        for entry in best:
            entry.before, entry.slow = len(entry.cold), 1.0  # its samples are of two heats from now on
        return best

    def hold(self, entered: list[_Standing], pacemaker: list[_Standing]) -> None:
        """Hold newcomers against what the pacemaker takes in this heat; and the others, where it took longer before."""
        for entry in pacemaker:
            then, now = (
                min(part, default=entry.time) for part in (entry.cold[: entry.before], entry.cold[entry.before :])
            )
            for other in self.entries:
                if other in entered:
                    other.slow = now / entry.time
                elif other is not entry:
                    other.slow = other.earlier * then / entry.time

    def keep_pace(self, finalists: list[_Standing]) -> None:
        """State the times of those that retired at the final's pace."""
        if finalists:
            pace = min(entry.time for entry in finalists) / min(entry.least for entry in finalists)
            for entry in self.entries:
                if not entry.final:
                    entry.slow /= pace

    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.budget is not None and self.spent + self.clock() - self.start >= self.budget

    def warm_up(self, entry: _Standing, part: float) -> None:
        entry.warm_up = _positive(entry.contestant.hot())
        entry.long = entry.warm_up > part
        if not entry.long and not self.pruned(entry):
            self.sample(entry)

    def look_again(self, entries: Sequence[_Standing]) -> None:
        """A first sample of those whose warm-up took long, the quickest first."""
        for place, entry in enumerate(sorted(entries, key=lambda entry: entry.warm_up)):
            if self.over() and place >= PLAY_OFF:
                return
            if not self.pruned(entry):
                self.turn(entry, len(self.entries) - len(entries) + place, self.sample)

    def round(self, entries: Sequence[_Standing], most: int) -> bool:
        """One more sample for each who needs it and has fewer than `most`; False when nobody does, or time is up."""
        goals = [(entry, min(self.goal(entry), most)) for entry in entries if entry.alive and not entry.retired]
        starters = [entry for entry, goal in goals if len(entry.samples) < goal]
        finished = len(self.entries) - len(starters)
        self.order.shuffle(starters)
        pools = [self.pool, *(entry.contestant.pool for entry in starters)]
        starters.sort(key=lambda entry: pools.index(entry.contestant.pool))  # to change pools seldom
        for entry in starters:
            if self.over():
                return False
            self.turn(entry, finished, self.sample)
        return bool(starters)

    def goal(self, entry: _Standing) -> int:
        """How many samples it should have, as things stand."""
        if self.pruned(entry):
            return 0
        if self.rival(entry, CLEARLY):
            return 2 if entry.doubtful else 0
        if self.rival(entry, TWICE):
            return 2
        contenders = self.contenders()
        if entry in contenders and not all(contender.settled for contender in contenders):
            return FEWEST if entry.spent >= FAIR_SHARE else MOST
        return FEWEST

    def pruned(self, entry: _Standing) -> bool:
        """Whether it is not worth the time that one more sample takes."""
        if entry.warm_up < PATIENCE:
            return False
        best = min(other.time for other in self.entries if other.alive)
        return entry.time >= FAR * best or self.rival(entry, CLEARLY) is not None

    def contenders(self) -> list[_Standing]:
        """Those close enough to the best, by run time or by run and pack time, to win yet."""
        racing = [entry for entry in self.entries if entry.alive and not entry.retired]
        time = min((entry.time for entry in racing), default=inf)  # not the fair one: that may be too good to be true
        cost = min((entry.cost for entry in racing), default=inf)
        return [e for e in racing if e.fair_time <= e.close * time or e.fair_cost <= e.close * cost]

    def rival(self, entry: _Standing, factor: float) -> Candidate | None:
        """Who makes the entry pointless: `factor` times as fast, and no worse under any limits."""
        for other in self.entries:
            if (
                other.alive
                and max(other.time, other.fair_time) * factor <= entry.fair_time
                and max(other.cost, other.fair_cost) * factor <= entry.fair_cost
                and other.contestant.undercuts(entry.contestant)
            ):
                return other.contestant.candidate
        return None

    def turn(self, entry: _Standing, finished: int, step: Callable[[_Standing], None]) -> None:
        """Let one contestant run, alone; what it raises is its own failure."""
        if self.on_event:
            self.on_event(entry.contestant.candidate, finished, len(self.entries))
        if self.pool is not None and self.pool != entry.contestant.pool:
            wait_until_idle(self.sleep, self.busy)
        self.pool = entry.contestant.pool
        self.start += self.ready()
        start = self.clock()
        try:
            step(entry)
        except Exception as failure:  # whatever one contestant does, the race goes on
            reason = f"{type(failure).__name__}: {failure}"
            entry.failure = starved(reason) if isinstance(failure, MemoryError) else reason
        entry.spent += self.clock() - start

    def sample(self, entry: _Standing) -> None:
        contestant = entry.contestant
        entry.cold.append(_positive(contestant.cold()))
        few = 1 if entry.spent >= FAIR_SHARE else FEWEST
        if len(entry.cold) > 1 and len(entry.hot) < few:  # who is dropped at the first sample needs none
            entry.hot.append(_positive(contestant.hot()))
        if contestant.pack is not None and len(entry.pack) < few:
            entry.pack.append(_positive(contestant.pack()))

    def result(self, entry: _Standing) -> Timing | str:
        if entry.failure is not None:
            return entry.failure
        return Timing(
            time=entry.fair_time,
            hot=min(entry.hot, default=None),
            pack=min(entry.pack, default=0.0),
            spread=spread(entry.samples if entry.final else entry.cold),
            samples=len(entry.samples if entry.final else entry.cold),
            dropped_by=self.rival(entry, TWICE) if len(entry.cold) < FEWEST else None,
        )


def _positive(seconds: float) -> float:
    if not 0 < seconds < inf:
        raise ValueError(f"the clock gave {seconds} s for one run")
    return seconds
