"""The command: limits, and another number of threads."""

from __future__ import annotations

import json

import pytest
from commands import tuned

from autoconv import registry
from autoconv.cli import main
from autoconv.cpu.device import CPU
from autoconv.tuning.planner import forget_plans

pytestmark = pytest.mark.usefixtures("place")


def test_other_limits_choose_again_without_timing(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys=capsys)
    for extra in (["--workspace-limit", "0"], ["--weights", "constant"], ["--deterministic"], ["--tolerance", "1e-6"]):
        forget_plans()
        found = tuned(*extra, capsys=capsys)
        assert found["timed"] == 0
    forget_plans()
    rows = tuned("--workspace-limit", "0B", capsys=capsys)["tables"][0]["layers"]
    assert [row["workspace_bytes"] for row in rows] == [0, 0]


def test_exact_times_and_lists_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    inexact = {algorithm.name for algorithm in registry.algorithms(CPU.current()) if not algorithm.exact}
    assert inexact
    assert tuned("--exact", capsys=capsys)["timed"] > 0
    assert main(["explain", "tiny.yaml:first", "--exact", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["from"] == "cache"
    assert not {name.partition("[")[0] for name in (*found["facts"], *found["reasons"])} & inexact


def test_another_number_of_threads_is_another_device(capsys: pytest.CaptureFixture[str]) -> None:
    one = CPU.current(1).key
    assert tuned("--threads", "1", capsys=capsys)["device"]["key"] == one
    for threads, source in (("1", "cache"), ("3", "heuristic")):
        assert main(["explain", "tiny.yaml:first", "--threads", threads, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["from"], found["device"] == one) == (source, threads == "1")
