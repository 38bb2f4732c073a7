"""`autoconv bench`: the table, the results that are kept, the chart, and the command itself."""

from __future__ import annotations

import errno
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import LAYER, broken, exactly, fake, place, row, samples, setting

import autoconv
from autoconv import networks, registry
from autoconv.bench import display, race, results
from autoconv.bench.baselines import ALL_BASELINES, BASELINES
from autoconv.bench.suites import OURS, Row, Suite
from autoconv.cli import bench as command
from autoconv.cli import main
from autoconv.common.candidate import Candidate
from autoconv.cpu import device
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer
from autoconv.networks import NamedLayer, Network

__all__ = ["place"]  # a fixture

pytestmark = pytest.mark.usefixtures("few_families")


def test_the_table_has_layers_means_losses_sums_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    display.print_suite(samples())
    text = capsys.readouterr().out
    assert "2.00 [2.00 2.00]" in text
    assert "slower than the best baseline: 1 of 2 layers" in text
    assert "sum of the layers, each timed alone: autoconv 5 ms" in text
    assert "\n  all " in text
    assert "vendor libraries off" in text
    assert "exact" not in text
    assert "INCOMPLETE" not in text


def test_the_caption_says_what_was_asked_for() -> None:
    exact = setting("torch", constant=False, fresh=True, exact=True)
    text = "\n".join(display.caption(Suite("Tiny", 1, exact, 0, False)))
    for part in ("only exact algorithms", "varying, transformed in every run", "a new array in every run"):
        assert part in text
    gradient = "\n".join(display.caption(Suite("Tiny", 1, setting("torch", direction="wgrad"), 0, False)))
    assert "NCHW arrays in and out" in gradient
    assert "filters" not in gradient
    assert "ONNX" not in gradient
    last = display.caption(Suite("Tiny", 1, exact, 1, False, [row(layer=LAYER.replace(layout="NHWC"), ours=[1.0])]))
    assert "vendor libraries off; NHWC arrays in and out" in last[1]


def test_incomplete_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = samples()
    found.rows[0].failures["torch"] = "it broke"
    display.print_suite(found)
    assert capsys.readouterr().out.endswith("INCOMPLETE: alpha: torch: it broke\n")


def test_json_holds_every_sample() -> None:
    found = json.loads(json.dumps(results.to_json(samples()), allow_nan=False))
    assert found["layers"][0]["seconds"][OURS] == [1e-3] * 6
    assert found["layers"][0]["ratios"]["best"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["means"]["best"]["median"] == pytest.approx(1.0)
    assert found["class_means"]["1x1"]["best"]["median"] == pytest.approx(0.5)
    assert found["network"]["sum"]["torch"]["median"] == pytest.approx((2e-3 + 2 * 9.0) / 5e-3)
    assert found["incomplete"] == []
    assert list(found["baselines"]) == list(BASELINES)
    assert found["layers"][0]["candidate"] == "numpy.gemm[tile=image]"


def algorithm(row: Row) -> str:
    assert row.candidate is not None
    return Candidate.parse(row.candidate).algorithm


def test_a_result_goes_on_where_it_ended(place: Path) -> None:
    net, turns = networks.load("tiny.yaml"), iter([False, False, False, True])  # to tune two, and to time the first
    entrants = {"torch": fake("torch")}
    wanted = setting("torch", rounds=2)
    begun = race.run_suite(net, 1, wanted, baselines=entrants, folder=place / "out", over=lambda: next(turns))
    assert [row.name for row in begun.rows] == ["first"]
    assert begun.incomplete[-1] == "ended after 1 of 2 layers"
    (path,) = (place / "out").iterdir()
    assert path.name == f"tiny-batch1-threads{wanted.device.threads}.json"

    older = json.loads(path.read_text())
    assert older.pop("autoconv") == autoconv.__version__
    versions = {a.name: a.version for a in registry.algorithms(wanted.device)}
    assert older["layers"][0].pop("version") == begun.rows[0].version == versions[algorithm(begun.rows[0])]
    path.write_text(json.dumps(older))  # as it was before it said of which code it is

    asked = []
    once = fake("torch", lambda problem: asked.append(problem.layer.R) or exactly(problem))
    ended = race.run_suite(net, 1, wanted, baselines={"torch": once}, folder=place / "out")
    assert asked == [1]
    assert [row.name for row in ended.rows] == ["first", "second"]
    assert ended.rows[0].times == results.rounded(begun.rows[0].times)
    assert [row.version for row in ended.rows] == [None, versions[algorithm(ended.rows[1])]]
    stored = json.loads(path.read_text())
    assert [layer["name"] for layer in stored["layers"]] == ["first", "second"]
    assert stored["means"]["torch"]["layers"] == 2
    with pytest.raises(ConfigError, match="rounds: expected 3 as in this run, got 2"):
        race.run_suite(net, 1, setting("torch", rounds=3), baselines=entrants, folder=place / "out")
    for strange in ("[]", "[" * 100_000):
        path.write_text(strange)
        with pytest.raises(ConfigError, match="expected a result of `autoconv bench`"):
            race.run_suite(net, 1, wanted, baselines=entrants, folder=place / "out")


def test_an_interruption_loses_nothing_of_an_earlier_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, wanted, entrants = networks.load("tiny.yaml"), setting("torch", rounds=2), {"torch": fake("torch")}
    race.run_suite(net, 1, wanted, baselines=entrants, folder=place / "out")
    (path,) = (place / "out").iterdir()
    stored = json.loads(path.read_text())
    stored["layers"][0]["failures"] = {"torch": "no memory"}  # so that it is measured again
    path.write_text(json.dumps(stored))

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(race, "measured", interrupt)
    assert race.run_suite(net, 1, wanted, baselines=entrants, folder=place / "out").interrupted
    assert [layer["name"] for layer in json.loads(path.read_text())["layers"]] == ["second"]
    some = race.run_suite(net, 1, wanted, names=["second"], baselines=entrants, folder=place / "out")
    assert len(some.rows) == 0, "interrupted before"
    assert {found.name for found in (place / "out").iterdir()} == {path.name, f"{path.stem}-second.json"}


def test_results_of_some_layers_have_names_that_a_file_can_have() -> None:
    found, names = samples(), set()
    long = tuple(f"layer{n}" for n in range(99))
    strange = ("a+b", "c"), ("a", "b+c"), ("/features/0/Conv",), ("/features/0", "Conv")
    several = ("one", "two"), ("one-two",), *strange, long
    for some in several:
        found.names = some
        names.add(results.file_name(found))
    assert len(names) == len(several)
    assert f"tiny-batch1-threads{found.setting.device.threads}-one+two.json" in names
    assert all("/" not in name and len(name) < 200 for name in names)


def test_what_other_code_has_done_is_measured_again(place: Path) -> None:
    net, wanted, entrants = networks.load("tiny.yaml"), setting("torch", rounds=2), {"torch": fake("torch")}
    race.run_suite(net, 1, wanted, baselines=entrants, folder=place / "out")
    (path,) = (place / "out").iterdir()
    stored = json.loads(path.read_text())
    stored["layers"][1]["version"] = "of other code"
    path.write_text(json.dumps(stored))
    asked = []
    once = fake("torch", lambda problem: asked.append(problem.layer.R) or exactly(problem))
    race.run_suite(net, 1, wanted, baselines={"torch": once}, folder=place / "out")
    assert asked == [1]


def test_a_failure_is_measured_again(place: Path) -> None:
    net = Network("One", "", (NamedLayer("plain", LAYER, 1, 1),))
    for answer, failures in ((broken, {"torch": "no kernel for this"}), (exactly, {})):
        entrants = {"torch": fake("torch", answer)}
        found = race.run_suite(net, 1, setting("torch", rounds=2), baselines=entrants, folder=place)
        assert found.rows[0].failures == failures


def test_a_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    display.chart([samples(), samples()], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def verb(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, with fake baselines that are always there."""
    for name in ALL_BASELINES:
        monkeypatch.setitem(ALL_BASELINES, name, fake(name))
    monkeypatch.setattr(race, "onnxruntime_network", lambda problems, outs, threads: lambda: None)

    def run(*arguments: str) -> int:
        return main(["bench", *arguments])

    return run


def test_the_command_prints_a_table_and_json(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("tiny.yaml", "--rounds", "6") == 0
    assert "first" in capsys.readouterr().out
    assert verb("tiny.yaml", "--batch", "1,2", "--rounds", "6", "--json", "--exact", "--layers", "second") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert [found["batch"] for found in json.loads(captured.out)] == [1, 2]


def test_layers_in_16_bits_are_compared_with_who_has_them(
    verb: Callable[..., int], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "tiny.yaml", "--batch", "1", "--rounds", "6", "--dtype", "bfloat16", "-o", "results"
    assert verb(*arguments, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16"
    assert list(found["baselines"]) == ["torch", "torch_cl", "torch_packed"]
    assert [ConvLayer.parse(row["layer"]).dtype for row in found["layers"]] == ["bfloat16"] * 2
    assert all(row["seconds"].keys() == {"autoconv", *found["baselines"]} for row in found["layers"])
    (kept,) = (place / "results").iterdir()
    assert kept.name == "tiny-batch1-threads2-bfloat16.json".replace("threads2", f"threads{found['threads']}")
    assert verb(*arguments) == 0
    assert "Tiny, batch 1, fwd, bfloat16" in capsys.readouterr().out
    assert verb("tiny.yaml", "--dtype", "float16", "--against", "ncnn") == 2
    told = "--against ncnn: expected some of torch,torch_cl,torch_packed with fwd and constant filters in float16"
    assert told in capsys.readouterr().err
    assert verb("tiny.yaml", "--dtype", "bfloat16", "--device", "cuda", "-o", "results") == 2
    assert "--dtype: expected --device cpu" in capsys.readouterr().err


def test_layers_can_be_left_out(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("tiny.yaml", "--batch", "1", "--rounds", "6", "--json", "--without", "first") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["layers"]] == ["second"]
    assert verb("tiny.yaml", "--without", "conv9") == 2
    assert "Tiny has no layer 'conv9'" in capsys.readouterr().err
    assert verb("tiny.yaml", "--without", "first,second") == 2
    assert "--without first,second: no layer of Tiny is left" in capsys.readouterr().err


def test_other_types_of_a_later_suite_are_refused_before_the_first_is_timed(
    verb: Callable[..., int], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(race, "planned", lambda *_: pytest.fail("it was tuned"))
    (place / "double.yaml").write_text("layers: [{name: one, C: 3, H: 6, K: 4, R: 3, dtype: float64}]")
    assert verb("tiny.yaml", "double.yaml", "--json") == 2
    told = "double: layer 'one': dtype='float64': expected 'float32', from which layers of other types are derived"
    assert capsys.readouterr().err == f"autoconv: error: {told}\n"


def test_results_of_two_suites_that_would_have_one_name_are_refused(
    verb: Callable[..., int], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("a/Tiny net.yaml", "b/tiny-net.yaml"):
        (place / path).parent.mkdir()
        (place / path).write_text("layers: [{name: one, C: 3, H: 6, K: 4, R: 3}]")
    assert verb("a/Tiny net.yaml", "b/tiny-net.yaml", "-o", "out") == 2
    said = capsys.readouterr()
    told = "-o out: the results of a/Tiny net.yaml and b/tiny-net.yaml would have one name there"
    assert (said.out, said.err) == ("", f"autoconv: error: {told}\n")
    assert not (place / "out").exists()


@pytest.mark.filterwarnings("default:the results of Tiny are not kept")
def test_what_cannot_be_kept_is_shown_and_the_rest_measured(
    verb: Callable[..., int], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = [True, False]

    def write(path: Path, content: str | bytes) -> None:
        if full and full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(results, "write_whole", write)
    assert verb("tiny.yaml", "--rounds", "6", "-o", "out") == 0, "what was not kept at first was kept at last"
    assert "warning: the results of Tiny are not kept: out/tiny-batch1-threads" in capsys.readouterr().err
    full[:] = [True] * 9
    assert verb("tiny.yaml", "--rounds", "6", "-o", "out", "--json") == 1
    assert [row["name"] for row in json.loads(capsys.readouterr().out)[0]["layers"]] == ["first", "second"]


def test_a_chart_that_cannot_be_written_costs_no_table(
    verb: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def write(path: Path, content: str | bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(display, "write_whole", write)
    assert verb("tiny.yaml", "--rounds", "6", "--chart", "out.png") == 1
    said = capsys.readouterr()
    assert "first" in said.out
    assert said.err == "autoconv: error: out.png: No space left on device\n"


def test_pytorch_is_held_to_what_the_processor_has_more_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `AUTOCONV_ISA` says the same as `--isa`, or less."""
    for module in (command, device):
        monkeypatch.setattr(module, "host_level", lambda: "amx")
    monkeypatch.setattr(command, "restrict", lambda isa: {"held to": isa})
    for said in ("avx2", "amx"):
        monkeypatch.setenv("AUTOCONV_ISA", said)
        assert command._held(None, "avx2")[1] == {"held to": "avx2"}
        assert command._held(None, "amx")[1] == {}
        assert command._held(None, None)[1] == {}


def test_fewer_baselines_are_incomplete(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("tiny.yaml", "--rounds", "6", "--against", "torch") == 1
    assert "INCOMPLETE: torch, channels_last did not take part" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "tensorflow"], "expected some of torch,torch_cl,torch_packed,onnxruntime"),
        (["--batch", "0"], "expected integers from 1"),
        (["--rounds", "5"], "--rounds"),
        (["--layers", "conv9"], "has no layer 'conv9'"),
        (["nowhere"], "no such file"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_chart_in_a_missing_folder_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found("json" if name == "matplotlib" else name))
    assert main(["bench", "--chart", "nowhere/out.png"]) == 2
    assert capsys.readouterr().err == "autoconv: error: --chart nowhere/out.png: there is no folder nowhere\n"


def test_a_chart_without_matplotlib_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert main(["bench", "--chart", "out.png"]) == 2
    assert "pip install 'autoconv[report]'" in capsys.readouterr().err


def test_what_a_baseline_has_not_is_not_asked_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--direction", "wgrad", "--against", "onnxruntime"]) == 2
    assert "expected some of torch,torch_cl with wgrad and constant filters" in capsys.readouterr().err
    assert main(["bench", "--weights", "varying", "--against", "torch,ncnn"]) == 2
    assert "--against ncnn: expected some of torch,torch_cl,onnxruntime,openvino with fwd" in capsys.readouterr().err
