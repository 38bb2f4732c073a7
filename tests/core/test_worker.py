"""A worker process that crashes, exits or hangs costs its candidate the race, and nothing else."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty import EmptyCPU, Faulty, FaultyCPU, patient_but_with_hangs
from forked import exit_code, forks

from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.cpu.machine import recorded
from autoconv.cpu.numpy.direct import NumpyDirect
from autoconv.cpu.numpy.gemm import NumpyGemm
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.tuning import process as processes
from autoconv.tuning import worker as isolate
from autoconv.tuning.measurement import Event
from autoconv.tuning.verification import Verifier

LAYER = ConvLayer(N=1, C=3, H=6, W=6, K=4, R=3, S=3)
GEMM = NumpyGemm()


def measured(*faults: str, **options: object) -> dict[str, str | None]:
    device = FaultyCPU.having(*faults)
    worker = isolate.Worker(device)
    try:
        candidates = [Candidate("numpy.direct"), *(Candidate(f"faulty.{fault}") for fault in faults)]
        facts = worker.measure(LAYER, candidates, **options)  # type: ignore[arg-type]
    finally:
        worker.close()
    assert all(found.time > 0 for found in facts.values() if found.failure is None)
    return {str(candidate): found.failure for candidate, found in facts.items()}


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return patient_but_with_hangs(monkeypatch)


def test_algorithms_that_came_later_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FaultyCPU.having("none")
    with monkeypatch.context() as before:
        before.setattr(isolate.registry, "algorithms", lambda device: [])
        worker = isolate.Worker(device)
    try:
        (facts,) = worker.measure(LAYER, [Candidate("faulty.none")]).values()
    finally:
        worker.close()
    assert facts.failure is None


def test_good_candidates_come_back_with_their_facts() -> None:
    events: list[Event] = []
    failures = measured("none", progress=events.append)
    assert failures == {"numpy.direct": None, "faulty.none": None}
    assert {event.stage for event in events} == {"verify", "race", "done"}


def test_a_worker_prepares_no_more_when_time_is_up() -> None:
    worker = isolate.Worker(FaultyCPU.having("none", "slow"))
    try:
        candidates = [Candidate("numpy.direct"), Candidate("faulty.none"), Candidate("faulty.slow")]
        facts = worker.begin(LAYER, preparing=0.0).enter(candidates)
    finally:
        worker.close()
    assert [facts[candidate].unreached for candidate in candidates] == [False, False, True]


def test_crashes_are_recorded_and_the_rest_goes_on() -> None:
    reasons = {
        "dies": "died of signal 11 (SIGSEGV) (being verified)",
        "dies_later": "died of signal 6 (SIGABRT) (being timed)",
        "killed": "unreached, no memory: the worker died of signal 9 (SIGKILL) (being verified)",
        "exits": "exited with status 3",
        "raises": "ValueError: no such thing",
    }
    failures = measured(*reasons, "none")
    for fault, reason in reasons.items():
        assert reason in str(failures.pop(f"faulty.{fault}"))
    assert failures == {"numpy.direct": None, "faulty.none": None}


@pytest.mark.parametrize(("budget", "patience"), [(1.0, 6.0), (9.0, 18.0), (None, isolate.PATIENCE)])
def test_a_hang_is_cut_short_and_recorded(budget: float | None, patience: float, waits: list[float]) -> None:
    failures = measured("hangs", "none", budget=budget)
    reason = str(failures.pop("faulty.hangs"))
    assert f"overran: no sign of life for {patience:g} s (being verified)" in reason
    assert reason.startswith("unreached") == (budget is not None), "a larger budget may be enough"
    assert failures.keys() == {"numpy.direct", "faulty.none"}
    assert budget or not any(failures.values())
    assert waits[0] == isolate.PATIENCE  # importing everything takes time, and so may the right answer
    assert set(waits) == {isolate.PATIENCE, patience}


def test_a_worker_goes_by_the_model_of_the_machine_that_its_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes on record are those of kernels that the model makes: nobody would believe others."""
    device, layer, sizes = CPU(1, "generic"), LAYER.replace(H=64), set()
    worker, (candidate,) = isolate.Worker(device), [c for c in GEMM.all(layer, device) if c.params["tile"] == "rows"]
    try:
        for cache in (1 << 12, 1 << 14):
            model = replace(device.machine, caches=(cache, cache, cache))
            monkeypatch.setitem(recorded._in_force, device.key, model)
            size = worker.measure(layer, [candidate])[candidate].workspace
            assert size == GEMM.workspace_bytes(layer, device, candidate.params)
            sizes.add(size)
    finally:
        worker.close()
    assert len(sizes) == 2


def test_a_worker_that_dies_between_two_questions_begins_again() -> None:
    worker, candidate = isolate.Worker(FaultyCPU.having("none")), Candidate("faulty.none")
    try:
        worker.begin(LAYER).enter([candidate])
        worker._process.close()
        assert worker.finish()[candidate].timed
    finally:
        worker.close()


def test_the_right_answer_to_a_huge_layer_may_take_as_long_as_is_expected_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that hangs is ended all the same: every other step has the usual time."""
    layer, device = ConvLayer(N=64, C=1024, H=256, W=256, K=1024, R=5, S=5, padding=2), FaultyCPU.having("none")
    worker, waits = isolate.Worker(device), list[float]()

    def receive(patience: float) -> dict[str, object]:
        waits.append(patience)
        return {"facts": {}}

    silent = SimpleNamespace(send=lambda message: None, receive=receive, close=lambda: None, alive=True)
    monkeypatch.setattr(worker, "_process", silent)
    worker.begin(layer).enter([])
    expected = 2 * NumpyDirect().estimate(layer.replace(dtype="float64"), device, {})
    assert waits == [isolate.SLACK * expected, isolate.PATIENCE, isolate.PATIENCE]
    assert waits[0] > expected > 0
    waits.clear()
    worker.begin(LAYER).enter([])
    assert waits == [isolate.PATIENCE] * 3


@pytest.mark.parametrize("budget", [None, 9.0])
def test_a_step_of_a_huge_layer_may_take_as_long_as_its_candidate_is_expected_to(
    monkeypatch: pytest.MonkeyPatch, budget: float | None
) -> None:
    """Where no budget is given; nothing else is verified if the right answer itself takes minutes."""
    device = FaultyCPU.having("none")
    monkeypatch.setattr(NumpyDirect, "estimate", lambda *_: 100.0)
    monkeypatch.setattr(Faulty, "estimate", lambda *_: 1e-6)
    worker, waits = isolate.Worker(device), list[float]()
    step = {"stage": "verify", "done": 0, "total": 2}
    steps = [step | {"candidate": name} for name in ("numpy.direct", "faulty.none")]
    answers = iter([{"facts": {}}, {"facts": {}}, *steps, {"facts": {}}])

    def receive(patience: float) -> dict[str, object]:
        waits.append(patience)
        return next(answers)

    silent = SimpleNamespace(send=lambda message: None, receive=receive, close=lambda: None, alive=True)
    monkeypatch.setattr(worker, "_process", silent)
    worker.begin(LAYER, budget=budget).enter([])
    usual = isolate.PATIENCE if budget is None else 18.0
    assert waits[-2:] == [usual if budget else isolate.SLACK * 100.0, usual]


def test_a_wait_may_be_longer_than_the_system_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # it is not to be patient
    process = processes.DeviceProcess(FaultyCPU.having("none"), "autoconv.tuning.worker")
    threading.Timer(0.05, process._lines.put, ['{"layer": 1}']).start()
    assert process.receive(1e18) == {"layer": 1}


@pytest.mark.parametrize("missing", ["process", "thread", "file"])
def test_a_worker_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no more") if missing == "thread" else BlockingIOError(11, "no more")

    where = {"process": "subprocess.Popen", "thread": "threading.Thread.start", "file": "tempfile.TemporaryFile"}
    process = processes.DeviceProcess(FaultyCPU.having("none"), "autoconv.tuning.worker")
    with monkeypatch.context() as lacking:
        lacking.setattr(processes, "_read", lambda pipe, lines: None)
        lacking.setattr(where[missing], refuse)
        with pytest.raises(PlanError, match=r"the worker process autoconv\.tuning\.worker cannot be started: no more"):
            process.send({"layer": LAYER.key()})
    assert not process.alive
    process.send({"layer": LAYER.key()})  # there is one again
    assert process.alive
    process.close()


def test_a_worker_that_does_not_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("PATIENCE", "LEAST_PATIENCE", "SLACK"):
        monkeypatch.setattr(isolate, name, 0.0)
    worker = isolate.Worker(FaultyCPU.having("none"))
    with pytest.raises(PlanError, match=r"ended before it began with any candidate: overran: no sign of life for 0 s$"):
        worker.measure(LAYER, [Candidate("faulty.none")], budget=0.0)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'no room here')\nos._exit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match=r"any candidate: exited with status 4: no room here$"):
        measured("none")


@forks
def test_a_forked_child_leaves_the_worker_of_its_parent_alone() -> None:
    worker = isolate.Worker(FaultyCPU.having("none"))
    candidate = Candidate("faulty.none")
    try:
        assert worker.measure(LAYER, [candidate])[candidate].failure is None
        running = worker._process._process

        def child() -> int:
            found = worker.measure(LAYER, [candidate])[candidate].failure is None  # by a worker of its own
            worker.close()
            return int(found)

        assert exit_code(child) == 1
        assert worker.measure(LAYER, [candidate])[candidate].failure is None
        assert worker._process._process is running
    finally:
        worker.close()


def test_one_worker_serves_layer_after_layer() -> None:
    worker = isolate.Worker(FaultyCPU.having("none"))
    try:
        for width in (5, 6, 7):
            facts = worker.measure(LAYER.replace(W=width), [Candidate("faulty.none")])
            assert facts[Candidate("faulty.none")].failure is None
    finally:
        worker.close()


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next() -> None:
    worker = isolate.Worker(FaultyCPU.having("none", "slow"))

    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            worker.measure(LAYER, [Candidate("faulty.none")], progress=interrupt)
        assert worker.measure(LAYER.replace(W=7), [Candidate("faulty.slow")]).keys() == {Candidate("faulty.slow")}
    finally:
        worker.close()


def test_what_lies_or_prints_where_python_looks_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('this is not the queue of Python')\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\nprint('hello')\nos.write(1, bytes([255, 10]))\n")  # no text
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    assert measured("none") == {"numpy.direct": None, "faulty.none": None}


def test_a_worker_that_cannot_begin_says_why() -> None:
    worker = isolate.Worker(EmptyCPU.current())
    try:
        with pytest.raises(PlanError, match="cannot be measured: WrongResultError: no direct algorithm"):
            worker.measure(LAYER, [])
    finally:
        worker.close()


def test_a_wait_through_which_everybody_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(SimpleNamespace):
        """A clock that leaps by a minute during the first wait."""

        def monotonic(self) -> float:
            self.asked += 1
            return 60.0 * (self.asked > 1)

    monkeypatch.undo()  # it is not to be patient
    process = processes.DeviceProcess(FaultyCPU.having("none"), "autoconv.tuning.worker")
    process.send({"layer": LAYER.key(), "budget": None, "preparing": None, "fewest": 2})
    monkeypatch.setattr(processes, "time", clock := Stopped(asked=0))
    try:
        with pytest.raises(processes.NoAnswerError, match="no sign of life for 0 s"):
            process.receive(0.0)
        assert clock.asked == 4
    finally:
        process.close()


def test_whoever_a_process_has_forked_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forking.py").write_text(
        "import os, time\nif not os.fork():\n    time.sleep(30)\nprint('{\"forked\": 1}', flush=True)\ntime.sleep(30)\n"
    )
    monkeypatch.undo()  # it is not to be patient
    monkeypatch.syspath_prepend(tmp_path)
    process = processes.DeviceProcess(FaultyCPU.having("none"), "forking")
    begin = time.monotonic()
    process.send({})
    assert process.receive(isolate.PATIENCE) == {"forked": 1}
    with pytest.raises(processes.NoAnswerError, match=r"no sign of life for 0\.1 s"):
        process.receive(0.1)
    assert time.monotonic() - begin < 20


def test_a_process_answers_says_how_it_ended_and_begins_again() -> None:
    process = processes.DeviceProcess(FaultyCPU.having("exits"), "autoconv.tuning.worker")
    try:
        for _ in range(2):
            process.send({"layer": "nonsense", "budget": None, "preparing": None, "fewest": 2})
            assert process.receive(1.0)["error"].startswith("LayerError: ")
            process.send({"layer": LAYER.key(), "budget": None, "preparing": None, "fewest": 2})
            assert process.receive(1.0) == {"facts": {}}
            process.send({"enter": ["faulty.exits"]})
            assert process.receive(1.0)["stage"] == "verify"
            with pytest.raises(processes.NoAnswerError, match="exited with status 3"):
                process.receive(1.0)
    finally:
        process.close()


def test_races_of_one_layer_share_a_right_answer_that_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, device, right = isolate._Answers(), FaultyCPU.having("none"), list[ConvLayer]()
    monkeypatch.setattr(isolate, "Verifier", lambda *given: (right.append(given[0]), Verifier(*given))[1])
    limits = {"budget": None, "preparing": None, "fewest": 2}

    def race(layer: ConvLayer) -> None:
        said: list[processes.Message] = []
        for request in ({"layer": layer.key()} | limits, {"enter": ["faulty.none"]}, {"finish": True}):
            answers(device, request, said.append)
        (facts,) = said[-1]["facts"].values()
        assert facts["failure"] is None

    other = LAYER.replace(K=5)
    for layer in (LAYER, LAYER, other, LAYER):
        race(layer)
    assert right == [LAYER, other, LAYER]
    monkeypatch.setattr(FaultyCPU, "memory_available", lambda _: 16 * LAYER.bytes)  # enough to race, too little to stay
    race(LAYER)
    race(LAYER)
    assert right == [LAYER, other, LAYER, LAYER]
