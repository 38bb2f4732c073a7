"""The command: what it prints, how it exits, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty import FaultyCPU

import autoconv
from autoconv import networks, registry
from autoconv.cli import main, options, output
from autoconv.cli import tune as verb
from autoconv.cli.main import cli
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.tuning import planner
from autoconv.tuning.measurement import Event
from autoconv.tuning.planner import forget_plans

NET = """
name: Tiny
batch: 1
defaults: {bias: true, activation: relu}
layers:
  - {name: first, C: 3, H: 12, K: 4, R: 3, padding: 1}
  - {name: second, C: 4, H: 6, K: 8, R: 1, repeat: 2}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a small network and an empty cache of its own; NumPy's family alone, which compiles nothing."""
    monkeypatch.setattr(autoconv.cpu, "FAMILIES", ("numpy",))
    registry._table.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoconv.cli.records.TuningCache", partial(TuningCache, system=None))  # nothing comes along
    (tmp_path / "tiny.yaml").write_text(NET)
    yield tmp_path
    registry._table.cache_clear()


def run(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoconv", *args],
        capture_output=True,
        text=True,
        env=environment() | (env or {}),
        **options,
    )


class Named(NamedTuple):
    """Stands for an algorithm."""

    name: str


def environment() -> dict[str, str]:
    root = str(Path(autoconv.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def tuned(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["tune", "tiny.yaml", "--no-isolate", "--json", *args]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# What it does


def test_tune_times_everything_once_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "tiny.yaml"]) == 0
    first = capsys.readouterr()
    assert re.search(r"first +3x12x12 4x3x3 +\S+ .* new\n", first.out)
    assert re.search(r"second x2 .* new\n", first.out)
    assert re.search(r"2 layers, [1-9]\d* candidates timed", first.out)
    assert first.err == ""
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


def test_other_limits_choose_again_without_timing(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys=capsys)
    for extra in (["--workspace-limit", "0"], ["--weights", "constant"], ["--deterministic"], ["--tolerance", "1e-6"]):
        forget_plans()
        found = tuned(*extra, capsys=capsys)
        assert found["timed"] == 0
    forget_plans()
    rows = tuned("--workspace-limit", "0B", capsys=capsys)["tables"][0]["layers"]
    assert [row["workspace_bytes"] for row in rows] == [0, 0]


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


def test_budget_is_shared_among_the_layers_left(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        budgets.append(options["budget"])
        return planner.plan(layer, "heuristic")

    monkeypatch.setattr(verb, "plan", plan)
    clock = iter([0.0, 0.0, 8.0, 9.0])  # start, first layer, second layer, end
    monkeypatch.setattr(verb.time, "monotonic", lambda: next(clock))
    assert main(["tune", "tiny.yaml", "--budget", "10s"]) == 0
    assert budgets == [5.0, 2.0]


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
    assert "interrupted: 1 of 2 layers are done and kept" in captured.err
    monkeypatch.setattr(verb, "plan", real)
    forget_plans()
    rows = tuned(capsys=capsys)["tables"][0]["layers"]
    assert [row["from"] for row in rows] == ["cached", "new"]


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
    assert json.loads(capsys.readouterr().out)["tables"][0]["layers"][0]["winner"] == "numpy.direct"
    assert main(["explain", "tiny.yaml:first"]) == 0
    assert re.search(r"faulty.dies +died of signal 11", capsys.readouterr().out)


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


def test_show_says_who_won_when_and_with_which_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == 0
    assert "nothing on record yet" in capsys.readouterr().out
    tuned(capsys=capsys)
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"R3-S3-padding1x1-bias-relu +\S+ .*20\d\d-\d\d-\d\d .*in process +.*numpy \d", text)
    assert main(["show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 2
    assert main(["show", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert found[0]["seconds"] > 0
    assert found[0]["races"][0]["versions"]["numpy"]


def test_info_names_the_device_the_cache_and_what_is_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert str(place / "cache") in text
    assert re.search(r"missing +GPU: CuPy is not importable .*: pip install 'autoconv\[cuda13\]'", text)
    assert main(["info", "--device", "cuda"]) == 2
    assert "--device cuda: no CUDA device: CuPy is not importable" in capsys.readouterr().err
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["peak_gflops"]["float32"] > 0
    assert "numpy.direct" in found["algorithms"]
    assert found["cache"]["persistent"] is True


def test_info_keeps_to_the_width_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "algorithms", lambda device: [Named(f"algorithm{n}") for n in range(30)])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    first, *others = text.partition("algorithms")[2].partition("versions")[0].splitlines()
    assert first.startswith("   algorithm0, ")
    assert all(line.startswith(13 * " " + "algorithm") and len(line) <= 100 for line in others)
    assert " ".join(map(str.strip, [first, *others])) == ", ".join(f"algorithm{n}" for n in range(30))


def test_records_travel_from_cache_to_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tuned(capsys=capsys)
    assert main(["export", "records.json"]) == 0
    assert "2 records written to records.json" in capsys.readouterr().out
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(place / "other"))
    forget_plans()
    assert main(["import", "records.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records.json"]["taken"] == 2
    after = tuned(capsys=capsys)
    assert after["timed"] == 0
    assert after["tables"][0]["seconds"] == before["tables"][0]["seconds"]
    assert main(["import", "records.json"]) == 0
    assert "0 new, 0 merged, 2 known already" in capsys.readouterr().out


def test_a_record_that_makes_no_sense_is_refused_and_the_rest_taken(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys=capsys)
    assert main(["export", "records.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "records.json", "records": 2}
    text = Path("records.json").read_text()
    Path("records.json").write_text(text.replace('"layer":"fwd', '"layer":"sideways', 1))
    assert main(["import", "records.json"]) == 1
    captured = capsys.readouterr()
    assert "0 new, 0 merged, 1 known already" in captured.out
    assert captured.err.startswith("autoconv: error: records.json: record 1: ")


# What it prints


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


# What is refused

BAD = {
    "unknown command": (["tun"], "No such command 'tun'"),
    "unknown option": (["tune", "tiny.yaml", "--frob"], "No such option"),
    "no network": (["tune"], "Missing argument 'NET...'"),
    "missing file": (
        ["tune", "nope.yaml"],
        "nope.yaml: no such file, and no network of that name comes with autoconv: expected one of alexnet",
    ),
    "missing network": (["tune", "alexnt"], "comes with autoconv: did you mean 'alexnet'? Expected one of alexnet, "),
    "a directory": (["tune", "."], ".: expected a YAML file, got a directory"),
    "batch 0": (["tune", "tiny.yaml", "--batch", "0"], "'--batch': '0': expected integers from 1 to 9999999"),
    "batch text": (["tune", "tiny.yaml", "--batch", "1,x"], "'1,x': expected integers from 1"),
    "batch huge": (["tune", "tiny.yaml", "--batch", "99999999"], "expected integers from 1"),
    "direction": (
        ["tune", "tiny.yaml", "--direction", "fwd,up"],
        "'fwd,up': expected all, or some of fwd,dgrad,wgrad",
    ),
    "device": (["tune", "tiny.yaml", "--device", "gpu"], "--device gpu: expected cpu, cuda or cuda:N"),
    "mode": (
        ["tune", "tiny.yaml", "--mode", "fast"],
        "--mode 'fast': expected one of profile, hybrid, heuristic, cached, an algorithm (numpy.direct, ",
    ),
    "budget": (
        ["tune", "tiny.yaml", "--budget", "soon"],
        "'soon': expected a number and one of ms, s, m, min, h, such as 60s",
    ),
    "budget unit": (["tune", "tiny.yaml", "--budget", "5y"], "'5y': expected a number and one of"),
    "size": (["tune", "tiny.yaml", "--workspace-limit", "-1"], "expected a number and one of B, kB, KB, MB"),
    "tolerance": (["tune", "tiny.yaml", "--tolerance", "nan"], "'nan': expected a number of at least 0"),
    "tolerance text": (["tune", "tiny.yaml", "--tolerance", "tight"], "'tight': expected a number of at least 0"),
    "weights": (["tune", "tiny.yaml", "--weights", "heavy"], "'heavy' is not one of 'varying', 'constant'"),
    "vendors": (["tune", "tiny.yaml", "--vendors", "intel"], "'intel' is not one of 'loaded', 'all', 'none'"),
    "device key": (
        ["export", "x.json", "--device", "cpu-x"],
        "--device cpu-x: nothing is on record for this device, nor for any other",
    ),
    "layer key": (["explain", "fwd-float32-N1"], "'fwd-float32-N1' is not a layer key: a key reads like"),
    "bad layer": (["explain", "fwd-float32-NCHW-N1-C3-H4-W4-K2-R5-S5"], "the output is empty"),
    "layer name": (
        ["explain", "tiny.yaml:frist"],
        "Tiny has no layer 'frist': did you mean 'first'? Expected one of first, second",
    ),
    "net of a name": (["explain", "nope.yaml:first"], "nope.yaml: no such file"),
    "no such candidate": (["explain", "tiny.yaml", "--mode", "numpy.gemm[x=1]"], "mode='numpy.gemm[x=1]'"),
    "import missing": (["import", "nope.json"], "nope.json: cannot be read: No such file"),
    "import foreign": (["import", "tiny.yaml"], "tiny.yaml: expected JSON"),
    "export": (["export", "nowhere/x.json"], "nowhere/x.json: No such file or directory"),
}
FAILED = {"no such candidate"}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_and_exit_code_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, message = BAD[case]
    assert main(args) == (1 if case in FAILED else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("autoconv: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_bad_file_names_file_line_and_layer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.yaml").write_text("layers:\n - {name: c1, C: 8, H: 9, K: on, R: 3}\n")
    assert main(["tune", "bad.yaml"]) == 2
    assert capsys.readouterr().err == (
        "autoconv: error: bad.yaml:2: layer 'c1': K='on': expected an integer, got str\n"
    )


@pytest.mark.parametrize("variable", ["AUTOCONV_NUM_THREADS", "AUTOCONV_ISA"])
def test_a_bad_environment_is_bad_usage(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "many")
    assert main(["tune", "tiny.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"autoconv: error: {variable}='many': ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("verb", "status", "shown"), [("explain", 0, "fwd-float32-NCHW-N1-C4"), ("tune", 1, "timed")])
def test_a_folder_that_cannot_be_written_costs_persistence_only(
    verb: str, status: int, shown: str, place: Path, request: pytest.FixtureRequest
) -> None:
    if verb == "tune" and not request.config.getoption("full"):
        pytest.skip("it surveys the machine: with --full")
    (place / "file").write_text("")
    (place / "one.yaml").write_text("name: One\nbatch: 1\nlayers: [{name: only, C: 4, H: 6, K: 8, R: 1}]\n")
    found = run(verb, "one.yaml", "--mode", "hybrid", env={"AUTOCONV_CACHE_DIR": str(place / "file" / "cache")})
    assert found.returncode == status
    assert shown in found.stdout
    lines = found.stderr.splitlines()
    assert lines  # one for the records, one for the compiled kernels
    assert all(line.startswith(f"autoconv: warning: {place / 'file' / 'cache'}") for line in lines)
    assert len(set(lines)) == len(lines)


@pytest.mark.filterwarnings("default::autoconv.errors.CacheWarning")
def test_a_tuning_that_could_not_be_kept_is_no_success(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(place / "file" / "cache"))
    assert main(["tune", "tiny.yaml", "--no-isolate"]) == 1
    captured = capsys.readouterr()
    assert "candidates timed" in captured.out
    assert "tuning is remembered by this process only" in captured.err


def test_the_process_exits_with_the_code_that_main_returns() -> None:
    found = run("tune", "nope")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("autoconv: error: nope: no such file")
    assert run("--version").returncode == 0
