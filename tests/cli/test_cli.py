"""The command: what it does, and what it prints."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import environment, run, tuned
from faulty import FaultyCPU

from autoconv import networks
from autoconv.cli import main, options, output
from autoconv.cli import tune as verb
from autoconv.cli.main import cli
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.failures import NO_CANDIDATE
from autoconv.records.schema import Facts
from autoconv.tuning import planner, racing
from autoconv.tuning.measurement import Event
from autoconv.tuning.planner import forget_plans

pytestmark = pytest.mark.usefixtures("place")


# What it does


def test_tune_times_everything_once_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "NEAR", 1e9)
    monkeypatch.setattr(racing, "NEAREST", 2)
    assert main(["tune", "tiny.yaml"]) == 0
    first = capsys.readouterr()
    assert re.search(r"first +3x12x12 4x3x3 +\S+ .* new\n", first.out)
    assert re.search(r"second x2 .* new\n", first.out)
    assert re.search(r"2 layers, [1-9]\d* candidates timed", first.out)
    assert first.err == ""
    layer = networks.load("tiny.yaml").find("first").at(1, "fwd").key()
    (record,) = (record for record in TuningCache().records() if str(record.layer) == layer)
    assert len(record.races) == 2, "those near the best race once more"
    forget_plans()
    assert main(["tune", "tiny.yaml"]) == 0
    second = capsys.readouterr().out
    assert re.search(r"first .* cached\n", second)
    assert "2 layers, nothing timed" in second


def test_json_holds_the_whole_result_and_totals_count_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned("--batch", "1,2", "--direction", "all", capsys=capsys)
    assert [(t["batch"], t["direction"]) for t in found["tables"]] == [
        (batch, direction) for batch in (1, 2) for direction in ("fwd", "dgrad", "wgrad")
    ]
    assert found["timed"] > 0
    table = found["tables"][0]
    first, second = table["layers"]
    assert table["seconds"] == pytest.approx(first["seconds"] + 2 * second["seconds"])
    layers = [ConvLayer.parse(row["layer"]) for row in table["layers"]]
    assert table["flops"] == layers[0].flops + 2 * layers[1].flops
    assert first["gflops"] == pytest.approx(layers[0].flops / first["seconds"] / 1e9)
    assert first["of_peak"] == pytest.approx(first["gflops"] / found["peak_gflops"]["float32"])
    assert first["runner_up_seconds"] > 0
    assert first["gemm_seconds"] > 0
    gradient = ConvLayer.parse(found["tables"][1]["layers"][0]["layer"])
    assert (gradient.direction, gradient.bias, gradient.activation) == ("dgrad", False, None)


def test_what_cannot_be_answered_is_a_row_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "tiny.yaml", "--mode", "cached"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 2
    assert captured.err.startswith("autoconv: error: first: nothing recorded for fwd-float32")
    assert "2 layers, nothing timed, 2 failed" in captured.out
    assert main(["tune", "tiny.yaml", "--mode", "cached", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["tables"][0]["layers"]
    assert all("nothing recorded" in row["error"] and row["from"] == "failed" for row in rows)


def test_heuristic_times_nothing_and_a_candidate_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned("--mode", "heuristic", capsys=capsys)
    assert found["timed"] == 0
    assert [row["from"] for row in found["tables"][0]["layers"]] == ["heuristic"] * 2
    assert found["tables"][0]["seconds"] is None
    assert main(["tune", "tiny.yaml", "--mode", "heuristic"]) == 0
    assert re.search(r"first .* - .* heuristic\n", capsys.readouterr().out)
    rows = tuned("--mode", "numpy.direct", capsys=capsys)["tables"][0]["layers"]
    assert [(row["winner"], row["from"]) for row in rows] == [("numpy.direct", "user")] * 2


def test_budget_is_shared_among_the_layers_left_once_the_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        budgets.append(options["budget"])
        return planner.plan(layer, "heuristic")

    monkeypatch.setattr(verb, "plan", plan)
    clock = iter([0.0, 1.0, 101.0, 101.0, 108.0, 109.0])  # start, lock, held, first layer, second layer, end
    monkeypatch.setattr(verb.time, "monotonic", lambda: next(clock))
    assert main(["tune", "tiny.yaml", "--budget", "10s"]) == 0
    assert budgets == [4.5, 2.0]


def test_a_budget_that_was_too_small_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "LEAST_BUDGET", 1e-9)
    for budget, told in (("0.1ms", True), ("600s", False)):
        forget_plans()
        assert main(["tune", "tiny.yaml", "--budget", budget, "--no-isolate"]) == 0
        assert ("not finished within the budget: 2 of 2 layers" in capsys.readouterr().out) == told


def test_what_the_library_notes_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        logging.getLogger("autoconv").warning("waiting for %s", "a lock\nof another")
        return planner.plan(layer, "heuristic")

    monkeypatch.setattr(verb, "plan", plan)
    assert main(["tune", "tiny.yaml", "--mode", "heuristic"]) == 0
    assert capsys.readouterr().err == "autoconv: note: waiting for a lock of another\n" * 2
    assert not logging.getLogger("autoconv").handlers


def test_ctrl_c_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = planner.plan

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        if layer.R == 1:
            raise KeyboardInterrupt
        return real(layer, mode, **options)

    monkeypatch.setattr(verb, "plan", plan)
    assert main(["tune", "tiny.yaml", "--no-isolate"]) == 130
    captured = capsys.readouterr()
    assert "first" in captured.out
    assert "interrupted: 1 of 2 layers done, and kept" in captured.err
    monkeypatch.setattr(verb, "plan", real)
    forget_plans()
    rows = tuned(capsys=capsys)["tables"][0]["layers"]
    assert [row["from"] for row in rows] == ["cached", "new"]


@pytest.mark.parametrize("start", ["runpy.run_module('autoconv', run_name='__main__')", "import autoconv.cli"])
def test_an_interrupt_while_the_command_is_imported_ends_it_quietly(start: str) -> None:
    """By `python -m autoconv`, or as it is installed."""
    code = f"""if True:
        import runpy, sys
        class Interrupted:
            def find_spec(self, name, path, target=None):
                if name == "autoconv.cli.tune":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted())
        {start}
    """
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_ends_the_process_and_its_worker_without_a_traceback(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "autoconv", "tune", "vgg16", "--batch", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        while not list((place / "cache").glob("*.lock")):  # the timing has begun
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.startswith("autoconv: error: interrupted")
    assert "Traceback" not in err


def test_a_candidate_that_crashes_is_a_reason_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = str(Path(__file__).parents[1])
    monkeypatch.syspath_prepend(tests)
    monkeypatch.setattr(options, "resolve", lambda name: FaultyCPU.having("dies"))
    assert main(["tune", "tiny.yaml", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tables"][0]["layers"][0]["winner"] == "numpy.direct"
    assert re.search(r"^autoconv: warning: first: faulty.dies failed: died of signal 11.*$", said.err, re.M)
    assert main(["explain", "tiny.yaml:first"]) == 0
    assert re.search(r"faulty.dies +died of signal 11", capsys.readouterr().out)


def test_a_former_winner_that_is_a_candidate_no_more_is_no_reason_to_warn(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"direct[TK=9]": Facts("1", failure=NO_CANDIDATE), "fft": Facts("1", failure="wrong result")}
    row = SimpleNamespace(name="first", plan=SimpleNamespace(facts=facts))
    verb._warn([row])  # type: ignore[list-item]
    assert capsys.readouterr().err == "autoconv: warning: first: fft failed: wrong result\n"


def test_explain_takes_a_layer_a_network_and_one_of_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    key = networks.load("tiny.yaml").find("first").layer.key()
    assert main(["explain", key]) == 0
    assert "from heuristic (nothing timed)" in capsys.readouterr().out
    tuned(capsys=capsys)
    assert main(["explain", "tiny.yaml:first"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(key)
    assert "from cache (nothing timed)" in text
    assert main(["explain", "tiny.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [ConvLayer.parse(x["layer"]).R for x in found] == [3, 1]
    assert found[0]["candidate"] == found[0]["ranking"][0]
    assert found[0]["facts"]["numpy.direct"]["time"] > 0
    assert main(["explain", "alexnet:conv1", "--batch", "2", "--direction", "wgrad", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["layer"].startswith("wgrad-float32-NCHW-N2-C3-H227")


def test_a_layer_without_an_answer_hides_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = networks.load("tiny.yaml")
    first, second = (named.layer.key() for named in tiny.layers)
    assert main(["explain", "tiny.yaml:second", "--mode", "profile"]) == 0
    capsys.readouterr()
    assert main(["explain", "tiny.yaml", "--mode", "cached"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(second)
    assert first not in said.out
    assert said.err.startswith(f"autoconv: error: {first}: nothing recorded for ")
    assert said.err.count("\n") == 1
    assert main(["explain", "tiny.yaml", "--mode", "cached", "--json"]) == 1
    assert [found["layer"] for found in json.loads(capsys.readouterr().out)] == [second]


def test_names_of_layers_and_of_files_may_have_colons(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = "{name: 'net/conv:0', C: 3, H: 6, K: 4, R: 3}, {name: '0', C: 4, H: 6, K: 8, R: 1}"
    (place / "a:b.yaml").write_text(f"layers: [{layers}]")
    for name, size in (("net/conv:0", 3), ("0", 1)):
        assert main(["explain", f"a:b.yaml:{name}", "--json"]) == 0
        assert [ConvLayer.parse(found["layer"]).R for found in json.loads(capsys.readouterr().out)] == [size]
    assert main(["explain", "a:b.yaml:net/conv"]) == 2
    assert "a:b has no layer 'net/conv': did you mean 'net/conv:0'?" in capsys.readouterr().err


def test_piped_output_has_no_colours_and_cuts_nothing(place: Path) -> None:
    name = "a_layer_with_a_name_that_is_longer_than_most_terminals_are_wide_" + "x" * 80
    (place / "long.yaml").write_text(f"layers: [{{name: {name}, C: 3, H: 6, K: 4, R: 3}}]")
    for env in ({"TERM": "xterm-256color", "COLUMNS": "40"}, {"PYTHONIOENCODING": "ascii"}):
        found = run("tune", "long.yaml", "--mode", "heuristic", env=env)
        assert found.returncode == 0
        assert name in found.stdout
        assert "\x1b" not in found.stdout + found.stderr
        assert found.stderr == ""
        assert all(line == line.rstrip() for line in found.stdout.splitlines())


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    script = f"{sys.executable} -m autoconv explain alexnet --json | head -1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment())
    assert found.stdout == "[\n"  # of more than a pipe holds
    assert found.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closed: str, place: Path) -> None:
    script = f"{sys.executable} -m autoconv tune tiny.yaml --mode heuristic {closed}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment())
    assert (found.returncode, found.stderr) == (0, "")
    assert ("2 layers, nothing timed" in found.stdout) == (closed == "2>&-")


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = ConvLayer(N=1, C=1, H=1, W=1, K=1, R=1, S=1)
    with output.progress_bar(1) as begin:
        assert begin(0, "x") is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar(2) as begin:
        on_event = begin(0, "Tiny first")
        assert on_event is not None
        on_event(Event("wait", layer, None, 0, 0))
        on_event(Event("verify", layer, "numpy.direct", 0, 3))
        on_event(Event("race", layer, "numpy.gemm", 1, 3))
        on_event(Event("done", layer, None, 3, 3))
    assert "Tiny first" in capsys.readouterr().err


def test_import_is_light() -> None:
    heavy = "{m for m in ('scipy', 'matplotlib', 'torch', 'onnxruntime', 'rich.table', 'llvmlite') if m in sys.modules}"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, autoconv.cli; print({heavy} or '')"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert (found.stdout.strip(), found.stderr) == ("", "")


def test_without_a_verb_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()] == list(cli.commands)
    assert "..." not in text.partition("Commands:\n")[2]  # nothing is cut
