"""The command: what it prints, how it exits, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyCPU

import autoconv.cpu
from autoconv.cli import main as cli
from autoconv.cli import options
from autoconv.cli import tables as report
from autoconv.layer import ConvLayer
from autoconv.networks import layers as network
from autoconv.plans import Plan
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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small network and an empty cache of its own; the floor alone, as nothing of it is compiled."""
    floor = tuple(a for a in autoconv.cpu.ALGORITHMS if a.name.startswith("numpy."))
    monkeypatch.setattr(autoconv.cpu, "ALGORITHMS", floor)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(NET)
    return tmp_path


def run(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoconv", *args],
        capture_output=True,
        text=True,
        env=environment() | (env or {}),
        **options,
    )


def environment() -> dict[str, str]:
    root = str(Path(report.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def tuned(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["tune", "tiny.yaml", "--no-isolate", "--json", *args]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# What it does


def test_tune_times_everything_once_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "tiny.yaml"]) == 0
    first = capsys.readouterr()
    assert re.search(r"first +3x12x12 4x3x3 +\S+ .* new\n", first.out)
    assert re.search(r"second x2 .* new\n", first.out)
    assert re.search(r"2 layers, [1-9]\d* candidates timed", first.out)
    assert first.err == ""
    forget_plans()
    assert cli.main(["tune", "tiny.yaml"]) == 0
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
    assert cli.main(["tune", "tiny.yaml", "--mode", "cached"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 2
    assert captured.err.startswith("autoconv: error: first: nothing recorded for fwd-float32")
    assert "2 layers, nothing timed, 2 failed" in captured.out
    assert cli.main(["tune", "tiny.yaml", "--mode", "cached", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["tables"][0]["layers"]
    assert all("nothing recorded" in row["error"] and row["from"] == "failed" for row in rows)


def test_heuristic_times_nothing_and_a_candidate_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned("--mode", "heuristic", capsys=capsys)
    assert found["timed"] == 0
    assert [row["from"] for row in found["tables"][0]["layers"]] == ["heuristic"] * 2
    assert found["tables"][0]["seconds"] is None
    assert cli.main(["tune", "tiny.yaml", "--mode", "heuristic"]) == 0
    assert re.search(r"first .* - .* heuristic\n", capsys.readouterr().out)
    rows = tuned("--mode", "numpy.direct", capsys=capsys)["tables"][0]["layers"]
    assert [(row["winner"], row["from"]) for row in rows] == [("numpy.direct", "user")] * 2


def test_budget_is_shared_among_the_layers_left(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        budgets.append(options["budget"])
        return planner.plan(layer, "heuristic")

    monkeypatch.setattr(cli, "plan", plan)
    clock = iter([0.0, 0.0, 8.0, 9.0])  # start, first layer, second layer, end
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(clock))
    assert cli.main(["tune", "tiny.yaml", "--budget", "10s"]) == 0
    assert budgets == [5.0, 2.0]


def test_ctrl_c_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = planner.plan

    def plan(layer: ConvLayer, mode: str, **options: Any) -> Plan:
        if layer.R == 1:
            raise KeyboardInterrupt
        return real(layer, mode, **options)

    monkeypatch.setattr(cli, "plan", plan)
    assert cli.main(["tune", "tiny.yaml", "--no-isolate"]) == 130
    captured = capsys.readouterr()
    assert "first" in captured.out
    assert "interrupted: 1 of 2 layers are kept" in captured.err
    monkeypatch.setattr(cli, "plan", real)
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
    assert cli.main(["tune", "tiny.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["layers"][0]["winner"] == "numpy.direct"
    assert cli.main(["explain", "tiny.yaml:first"]) == 0
    assert re.search(r"faulty.dies +died of signal 11", capsys.readouterr().out)


def test_explain_takes_a_layer_a_network_and_one_of_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    key = network.load("tiny.yaml").find("first").layer.key()
    assert cli.main(["explain", key]) == 0
    assert "from heuristic (nothing timed)" in capsys.readouterr().out
    tuned(capsys=capsys)
    assert cli.main(["explain", "tiny.yaml:first"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(key)
    assert "from cache (nothing timed)" in text
    assert cli.main(["explain", "tiny.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [ConvLayer.parse(x["layer"]).R for x in found] == [3, 1]
    assert found[0]["candidate"] == found[0]["ranking"][0]
    assert found[0]["facts"]["numpy.direct"]["time"] > 0
    assert cli.main(["explain", "alexnet:conv1", "--batch", "2", "--direction", "wgrad", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["layer"].startswith("wgrad-float32-NCHW-N2-C3-H227")


def test_show_says_who_won_when_and_with_which_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show"]) == 0
    assert "nothing on record yet" in capsys.readouterr().out
    tuned(capsys=capsys)
    assert cli.main(["show"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"R3-S3-padding1x1-bias-relu +\S+ .*20\d\d-\d\d-\d\d .*in process +.*numpy \d", text)
    assert cli.main(["show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 2
    assert cli.main(["show", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert found[0]["seconds"] > 0
    assert found[0]["races"][0]["versions"]["numpy"]


def test_info_names_the_device_the_cache_and_what_is_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert str(place / "cache") in text
    assert re.search(r"missing +GPU: CuPy is not importable .*: pip install 'autoconv\[cuda13\]'", text)
    assert cli.main(["info", "--device", "cuda"]) == 2
    assert "--device cuda: no CUDA device: CuPy is not importable" in capsys.readouterr().err
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["peak_gflops"]["float32"] > 0
    assert "numpy.direct" in found["algorithms"]
    assert found["cache"]["persistent"] is True


def test_records_travel_from_cache_to_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tuned(capsys=capsys)
    assert cli.main(["export", "records.json"]) == 0
    assert "2 records written to records.json" in capsys.readouterr().out
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(place / "other"))
    forget_plans()
    assert cli.main(["import", "records.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records.json"]["taken"] == 2
    after = tuned(capsys=capsys)
    assert after["timed"] == 0
    assert after["tables"][0]["seconds"] == before["tables"][0]["seconds"]
    assert cli.main(["import", "records.json"]) == 0
    assert "0 new, 0 merged, 2 known already" in capsys.readouterr().out


def test_a_record_that_makes_no_sense_is_refused_and_the_rest_taken(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys=capsys)
    assert cli.main(["export", "records.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "records.json", "records": 2}
    text = Path("records.json").read_text()
    Path("records.json").write_text(text.replace('"layer":"fwd', '"layer":"sideways', 1))
    assert cli.main(["import", "records.json"]) == 1
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


@pytest.mark.parametrize(
    ("columns", "lacking"), [(60, ["rival", "shape", "rate"]), (80, ["rival", "shape"]), (100, ["rival"]), (200, [])]
)
def test_a_narrow_terminal_shows_fewer_columns_and_every_figure(
    columns: int, lacking: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "direct[BK=16,BP=2,BQ=3,BC=16,filters=packed]"
    row = {"layer": "first", "shape": "256x13x13 384x3x3", "winner": name, ">time": "1.29 ms", ">rate": "94.7"}
    row |= {"rival": name, "from": "heuristic, though"}
    report.print_table("title", list(row), [list(row.values())], spare=["rival", "shape", ">rate"])
    *table, last = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, table)) <= columns
    shown = {"rate": "94.7", "shape": row["shape"]}
    for column, text in shown.items():
        assert (text in "\n".join(table)) == (column not in lacking)
    assert all(text in "\n".join(table) for text in ("1.29 ms", "heuristic, though"))
    assert last.strip() == (f"a wider terminal has room for: {', '.join(lacking)}" if lacking else "")


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    script = f"{sys.executable} -m autoconv explain resnet50 | head -1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment())
    assert found.stdout.startswith("fwd-float32")
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
    with cli._meter(1) as meter:
        assert meter(0, "x") is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with cli._meter(2) as meter:
        on_event = meter(0, "Tiny first")
        assert on_event is not None
        on_event(Event("wait", layer, None, 0, 0))
        on_event(Event("verify", layer, "numpy.direct", 0, 3))
        on_event(Event("race", layer, "numpy.gemm", 1, 3))
        on_event(Event("done", layer, None, 3, 3))
    assert "Tiny first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-7, "0.25 us"),
        (7.93e-4, "793 us"),
        (0.0012344, "1.23 ms"),
        (0.9994, "999 ms"),
        (12.34, "12.3 s"),
        (4321, "4321 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


def test_shapes_show_what_is_not_at_its_default() -> None:
    layer = ConvLayer(N=1, C=8, H=9, W=10, K=4, R=3, S=1, stride=2, dilation=(1, 2), groups=4)
    assert report.shape(layer) == "8x9x10 4x3x1 s2 d1x2 g4"


def test_import_is_light() -> None:
    heavy = "{m for m in ('scipy', 'matplotlib', 'torch', 'onnxruntime', 'rich.table', 'llvmlite') if m in sys.modules}"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, autoconv.cli; print({heavy} or '')"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert (found.stdout.strip(), found.stderr) == ("", "")


# What is refused

BAD = {
    "no command": ([], "Missing command"),
    "unknown command": (["tun"], "No such command 'tun'"),
    "unknown option": (["tune", "tiny.yaml", "--frob"], "No such option"),
    "no network": (["tune"], "Missing argument 'NET...'"),
    "missing file": (["tune", "nope.yaml"], "nope.yaml: no such file, and no network of that name; known are alexnet"),
    "missing network": (["tune", "lenet"], "lenet: no such file"),
    "a directory": (["tune", "."], "is a directory"),
    "batch 0": (["tune", "tiny.yaml", "--batch", "0"], "'--batch': '0': integers from 1"),
    "batch text": (["tune", "tiny.yaml", "--batch", "1,x"], "'1,x': integers from 1"),
    "batch huge": (["tune", "tiny.yaml", "--batch", "99999999"], "integers from 1"),
    "direction": (
        ["tune", "tiny.yaml", "--direction", "fwd,up"],
        "'fwd,up': allowed are all, or some of fwd,dgrad,wgrad",
    ),
    "device": (["tune", "tiny.yaml", "--device", "gpu"], "allowed are a Device, 'cpu', 'cuda' and 'cuda:N'"),
    "mode": (
        ["tune", "tiny.yaml", "--mode", "fast"],
        "--mode 'fast': allowed are profile, hybrid, heuristic, cached, ",
    ),
    "budget": (["tune", "tiny.yaml", "--budget", "soon"], "'soon': a number and one of ms, s, m, min, h is wanted"),
    "budget unit": (["tune", "tiny.yaml", "--budget", "5y"], "'5y': a number and one of"),
    "size": (["tune", "tiny.yaml", "--workspace-limit", "-1"], "a number and one of B, kB, KB, MB"),
    "tolerance": (["tune", "tiny.yaml", "--tolerance", "nan"], "'nan': a number of at least 0 is wanted"),
    "tolerance text": (["tune", "tiny.yaml", "--tolerance", "tight"], "'tight': a number of at least 0"),
    "weights": (["tune", "tiny.yaml", "--weights", "heavy"], "'heavy' is not one of 'varying', 'constant'"),
    "vendors": (["tune", "tiny.yaml", "--vendors", "intel"], "'intel' is not one of 'loaded', 'all', 'none'"),
    "device key": (
        ["export", "x.json", "--device", "cpu-x"],
        "--device cpu-x: of this nothing is on record; known are none",
    ),
    "layer key": (["explain", "fwd-float32-N1"], "'fwd-float32-N1' is not a layer key: a key reads like"),
    "bad layer": (["explain", "fwd-float32-NCHW-N1-C3-H4-W4-K2-R5-S5"], "the output is empty"),
    "layer name": (
        ["explain", "tiny.yaml:frist"],
        "Tiny has no layer 'frist': did you mean 'first'? Allowed are first, second",
    ),
    "net of a name": (["explain", "nope.yaml:first"], "nope.yaml: no such file"),
    "no such candidate": (["explain", "tiny.yaml", "--mode", "numpy.gemm[x=1]"], "mode='numpy.gemm[x=1]'"),
    "import missing": (["import", "nope.json"], "nope.json: cannot be read: No such file"),
    "import foreign": (["import", "tiny.yaml"], "tiny.yaml: not JSON"),
    "export": (["export", "nowhere/x.json"], "nowhere/x.json: No such file or directory"),
}
FAILED = {"no such candidate"}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_and_exit_code_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, message = BAD[case]
    assert cli.main(args) == (1 if case in FAILED else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("autoconv: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_bad_file_names_file_line_and_layer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.yaml").write_text("layers:\n - {name: c1, C: 8, H: 9, K: on, R: 3}\n")
    assert cli.main(["tune", "bad.yaml"]) == 2
    assert capsys.readouterr().err == (
        "autoconv: error: bad.yaml:2: layer 'c1': K='on': expected an integer, got str\n"
    )


@pytest.mark.parametrize("variable", ["AUTOCONV_NUM_THREADS", "AUTOCONV_ISA"])
def test_a_bad_environment_is_bad_usage(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "many")
    assert cli.main(["tune", "tiny.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"autoconv: error: {variable}='many': ")
    assert captured.err.count("\n") == 1


def test_a_folder_that_cannot_be_written_costs_persistence_and_not_the_answer(place: Path) -> None:
    (place / "file").write_text("")
    found = run("tune", "tiny.yaml", env={"AUTOCONV_CACHE_DIR": str(place / "file" / "cache")})
    assert found.returncode == 1
    assert "candidates timed" in found.stdout
    lines = found.stderr.splitlines()
    assert lines  # one for the records, one for the compiled kernels
    assert all(line.startswith(f"autoconv: warning: {place / 'file' / 'cache'}") for line in lines)
    assert len(set(lines)) == len(lines)


def test_the_process_exits_with_the_code_that_main_returns() -> None:
    found = run("tune", "nope")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("autoconv: error: nope: no such file")
    assert run("--version").returncode == 0
