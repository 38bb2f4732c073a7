"""Plans beside others: threads that plan or time at once, forked children, and workers that measure meanwhile."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from faulty import FaultyCPU
from forked import exit_code, forks
from planning import LAYER, fresh

from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.tuning import candidates, planner, racing
from autoconv.tuning.measurement import Event

pytestmark = pytest.mark.usefixtures("few_families")


def test_progress_may_plan_while_a_worker_measures(cache: TuningCache) -> None:
    options: dict[str, Any] = {"device": FaultyCPU.having("none"), "cache": cache, "isolate": True}
    inner: list[Plan] = []

    def progress(event: Event) -> None:
        if event.stage == "race" and not inner:
            inner.append(planner.plan(LAYER.replace(K=5), **options))

    outer = fresh(LAYER, progress=progress, **options)
    assert [made.timed for made in (outer, *inner)] == [2, 2]
    assert not racing._at_work


@forks
def test_a_child_forked_while_another_thread_plans_can_plan(cache: TuningCache) -> None:
    with racing._measuring, planner._lock:
        assert exit_code(lambda: planner.plan(LAYER, device=FaultyCPU.having("none"), cache=cache).timed) == 2


def test_who_has_to_wait_for_another_to_finish_timing_is_told(cache: TuningCache) -> None:
    events: queue.Queue[Event] = queue.Queue()
    options: dict[str, Any] = {"device": FaultyCPU.having("none"), "cache": cache, "progress": events.put}
    with racing._measuring:
        thread = threading.Thread(target=planner.plan, args=(LAYER,), kwargs=options)
        thread.start()
        assert events.get(timeout=60).stage == "wait"
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
    thread.join()
    assert events.get(timeout=60).stage == "verify"


@forks
def test_a_child_plans_though_another_thread_was_planning(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 holds a lock of the class while a `cached_property` is computed."""
    begun, release, test = threading.Event(), threading.Event(), threading.current_thread()
    expected = candidates.expected

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() is not test:
            begun.set()
            release.wait(60)
        return expected(*arguments)

    monkeypatch.setattr(candidates, "expected", slow)
    thread = threading.Thread(target=planner.plan, args=(LAYER, "heuristic"), kwargs={"cache": cache})
    thread.start()
    assert begun.wait(60)
    try:
        assert exit_code(lambda: planner.plan(LAYER.replace(N=2), "heuristic", cache=cache).timed) == 0
    finally:
        release.set()
        thread.join()
