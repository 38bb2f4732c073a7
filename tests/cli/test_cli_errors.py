"""The command: one clear line for whatever is wrong, and how it exits."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from commands import run

from autoconv.cli import main
from autoconv.cli.main import cli
from autoconv.cli.output import ARGUMENTS, failure_line, say_interrupted
from autoconv.tuning.planner import forget_plans

pytestmark = pytest.mark.usefixtures("place")

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
    "no such gpu": (["run", "net.onnx", "--device", "cuda:77"], "--device cuda:77: no CUDA device"),
    "threads on a GPU": (
        ["tune", "tiny.yaml", "--device", "cuda", "--threads", "2"],
        "--threads: expected with --device cpu alone, got --device cuda",
    ),
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
    "vendors": (["tune", "tiny.yaml", "--vendors", "intel"], "'intel' is not one of 'none', 'all'"),
    "device key": (
        ["export", "x.json", "--device", "cpu-x"],
        "--device cpu-x: nothing is on record for this device, nor for any other",
    ),
    "layer key": (["explain", "fwd-float32-N1"], "'fwd-float32-N1' is not a layer key: a key reads like"),
    "layer key and more": (
        ["explain", "fwd-float32-NCHW-N1-C3-H4-W4-K2-R3-S3", "--batch", "8", "--direction", "wgrad"],
        "--batch, --direction: expected with NET or NET:NAME, and not with a layer's key",
    ),
    "bad layer": (["explain", "fwd-float32-NCHW-N1-C3-H4-W4-K2-R5-S5"], "the output is empty"),
    "layer name": (
        ["explain", "tiny.yaml:frist"],
        "Tiny has no layer 'frist': did you mean 'first'? Expected one of first, second",
    ),
    "net of a name": (["explain", "nope.yaml:first"], "nope.yaml: no such file"),
    "no such candidate": (
        ["explain", "tiny.yaml:first", "--mode", "numpy.gemm[x=1]"],
        "H12-W12-K4-R3-S3-padding1x1-bias-relu: --mode numpy.gemm[x=1]: expected",
    ),
    "limits": (
        ["explain", "tiny.yaml:first", "--mode", "numpy.gemm", "--workspace-limit", "0", "--deterministic"],
        "under --workspace-limit 0, --deterministic: numpy.gemm[",
    ),
    "import missing": (["import", "nope.json"], "nope.json: cannot be read: No such file"),
    "import foreign": (["import", "tiny.yaml"], "tiny.yaml: expected JSON"),
    "export": (["export", "nowhere/x.json"], "nowhere/x.json: No such file or directory"),
    "export to no folder": (["export", "nowhere/"], "nowhere/: Not a directory"),
    "layers of nothing": (["layers", "nope.onnx"], "nope.onnx: cannot be read: No such file or directory"),
    "layers to nowhere": (["layers", "tiny.yaml", "-o", "nowhere/x.yaml"], "nowhere/x.yaml: No such file or directory"),
    "layers to a folder": (["layers", "tiny.yaml", "-o", "."], "File '.' is a directory"),
    "compare": (["compare", "tiny.yam"], "tiny.yam: no such file"),
    "compare against": (["compare", "tiny.yaml", "--against", "foo"], "'foo': expected some of torch,"),
    "compare rounds": (["compare", "tiny.yaml", "--rounds", "-5"], "-5 is not in the range"),
    "report": (["report", "tiny.yaml"], "expected -o FILE, --png FOLDER or both"),
    "report to nowhere": (["report", "tiny.yaml", "-o", "nowhere/x"], "-o nowhere/x: there is no folder nowhere"),
    "report batch": (["report", "tiny.yaml", "-o", "x.html", "--batch", "-3"], "-3 is not in the range x>=1"),
    "sweep of many": (["sweep", "tiny.yaml"], "tiny.yaml: expected one layer, a key or NET:NAME, got 2"),
    "sweep of a key": (
        ["sweep", "fwd-float32-NCHW-N1-C3-H4-W4-K2-R3-S3", "--direction", "fwd"],
        "--direction: expected with NET or NET:NAME, and not with a layer's key",
    ),
    "sweep extent": (["sweep", "tiny.yaml:first", "--extent", "Q"], "'Q': expected some of N,C,K,R,H"),
    "sweep values": (["sweep", "tiny.yaml:first", "--values", "1,2"], "expected --extent with one extent as well"),
    "sweep to an empty output": (
        ["sweep", "fwd-float32-NCHW-N1-C3-H8-W8-K4-R3-S3", "--extent", "H", "--values", "1"],
        "R=3 with dilation 1 spans 3, more than the padded H of 1: the output is empty",
    ),
    "sweep without times": (
        ["sweep", "tiny.yaml:first", "--extent", "N", "--values", "3", "--mode", "heuristic", "--vendors", "none"],
        "N=3: --mode heuristic: no time of numpy.",
    ),
    "bench layer": (["bench", "tiny.yaml", "--layers", "third"], "Tiny has no layer 'third': expected one of first"),
    "bench dry-run": (["bench", "tiny.yaml", "--dry-run"], "--dry-run: expected --device cuda as well"),
    "bench phase": (["bench", "--phase", "tune", "--export"], "--phase, --export: expected --device cuda as well"),
    "bench part": (["bench", "tiny.yaml", "--part", "48"], "--part: expected --device cuda as well"),
    "bench on a GPU": (
        ["bench", "--device", "cuda", "-o", "results", "--threads", "2", "--exact"],
        "--exact, --threads: expected --device cpu",
    ),
    "bench on no device": (
        ["bench", "--device", "gpu", "-o", "results", "--dry-run"],
        "--device gpu: expected cpu, cuda or cuda:N",
    ),
    "bench chart": (["bench", "tiny.yaml", "--chart", "x.txt"], "--chart x.txt: expected a name that ends in .png, "),
    "bench folder": (["bench", "tiny.yaml", "-o", "tiny.yaml/results"], "tiny.yaml/results: Not a directory"),
    "run": (["run", "nope.onnx"], "nope.onnx: cannot be read: No such file or directory"),
    "run a layer list": (["run", "tiny.yaml"], "tiny.yaml: a list of layers, which does not run: expected an ONNX "),
    "run a known network": (["run", "alexnet"], "alexnet: a list of layers, which does not run"),
}
FAILED = {"no such candidate", "limits", "sweep without times"}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_and_exit_code_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, message = BAD[case]
    assert main(args) == (1 if case in FAILED else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("autoconv: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert {path.name for path in Path().iterdir()} <= {"tiny.yaml", "cache"}  # nothing was written


def test_messages_name_options_and_not_arguments() -> None:
    options = {name for verb in cli.commands.values() for option in verb.params for name in option.opts}
    assert {"--" + name.replace("_", "-") for name in ARGUMENTS} <= options
    for message, told in {
        "net: batch=3: the file says 1": "net: --batch 3: the file says 1",
        "expected a number: give batch=...": "expected a number: give --batch",
        "mode='gemm[TK=4,NV=3]': exact=True leaves it out": "--mode gemm[TK=4,NV=3]: --exact leaves it out",
        "torch[weights=constant]: no times=3": "torch[weights=constant]: no times=3",  # a parameter of a candidate
    }.items():
        assert failure_line(message) == told


def test_a_list_that_cannot_be_written_whole_leaves_the_old_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "old.yaml").write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        assert main(["layers", "tiny.yaml", "-o", "old.yaml"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == "autoconv: error: old.yaml: File too large\n"
    assert (place / "old.yaml").read_text() == "old"
    assert sorted(path.name for path in place.iterdir()) == ["old.yaml", "tiny.yaml"]


def test_a_bad_file_names_file_line_and_layer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.yaml").write_text("layers:\n - {name: c1, C: 8, H: 9, K: on, R: 3}\n")
    assert main(["tune", "bad.yaml"]) == 2
    assert capsys.readouterr().err == (
        "autoconv: error: bad.yaml:2: layer 'c1': K='on': expected an integer, got str\n"
    )


def test_a_key_of_a_file_is_no_option(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bad.yaml").write_text("batch: [1, 0]\nlayers:\n - {name: c1, C: 8, H: 9, K: 2, R: 3}\n")
    assert main(["layers", "bad.yaml"]) == 2
    assert capsys.readouterr().err.startswith("autoconv: error: bad.yaml:1: batch=0: expected an integer from 1")


@pytest.mark.parametrize(
    "command", ["tune tiny.yaml", "bench tiny.yaml", "sweep tiny.yaml:first", "report tiny.yaml -o x"]
)
@pytest.mark.parametrize("variable", ["AUTOCONV_NUM_THREADS", "AUTOCONV_ISA", "AUTOCONV_SPLIT_PRODUCTS"])
def test_a_bad_environment_is_bad_usage(
    variable: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith("report"):
        pytest.importorskip("matplotlib", reason="NOT CHECKED: no matplotlib")
    monkeypatch.setenv(variable, "many")
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"autoconv: error: {variable}='many': ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("verb", "status", "shown"), [("explain", 1, "fwd-float32-NCHW-N1-C4"), ("tune", 1, "timed")])
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


def test_a_cache_that_cannot_be_used_is_a_warning_also_where_warnings_are_raised(place: Path) -> None:
    (place / "file").write_text("")
    layer = "fwd-float32-NCHW-N1-C3-H4-W4-K2-R3-S3"
    found = run("explain", layer, env={"AUTOCONV_CACHE_DIR": str(place / "file"), "PYTHONWARNINGS": "error"})
    assert found.returncode == 0
    assert all(line.startswith(f"autoconv: warning: {place / 'file'}") for line in found.stderr.splitlines())
    assert "tuning is remembered by this process only" in found.stderr


@pytest.mark.filterwarnings("default::autoconv.errors.CacheWarning")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["tune", "tiny.yaml", "--no-isolate"], "candidates timed"),
        (["explain", "tiny.yaml:first", "--mode", "hybrid"], "GFLOP"),
        (["sweep", "tiny.yaml:first", "--extent", "N", "--values", "1", "--no-isolate"], "as N grows"),
    ],
    ids=["tune", "explain", "sweep"],
)
def test_what_is_timed_and_could_not_be_kept_is_no_success(
    arguments: list[str], shown: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(place / "file" / "cache"))
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert shown in captured.out
    assert "tuning is remembered by this process only" in captured.err
    say_interrupted(1, 2)
    assert "interrupted: 1 of 2 layers done, and not all of it kept" in capsys.readouterr().err
    forget_plans()
    assert main(["explain", "tiny.yaml"]) == 0, "as nothing is timed"


def test_the_process_exits_with_the_code_that_main_returns() -> None:
    found = run("tune", "nope")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("autoconv: error: nope: no such file")
    assert run("--version").returncode == 0
