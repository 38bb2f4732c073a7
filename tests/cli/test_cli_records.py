"""The command about what there is: who won on which device, the machine, and records that travel."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import tuned
from races import LAYER, race

from autoconv import registry
from autoconv.bench.baselines import BASELINES
from autoconv.bench.networks.runtimes import RUNTIMES
from autoconv.cli import main
from autoconv.common import machine_code
from autoconv.common.candidate import Candidate
from autoconv.cpu.device import CPU
from autoconv.records.cache import TuningCache
from autoconv.records.schema import Facts
from autoconv.tuning.planner import forget_plans

pytestmark = pytest.mark.usefixtures("place")


class Named(NamedTuple):
    """Stands for an algorithm."""

    name: str


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


def test_show_counts_packing_as_tune_does(capsys: pytest.CaptureFixture[str]) -> None:
    layer, key = "fwd-float32-NCHW-N1-C3-H12-W12-K4-R3-S3-padding1x1-bias-relu", CPU.current().key
    facts = {"numpy.gemm[tile=image]": (2.0, 1.0), "numpy.direct": (1.0, 3.0)}
    TuningCache().add(
        layer,
        key,
        dataclasses.replace(
            race(),
            facts={Candidate.parse(name): Facts("1", time=t, pack=p, samples=5) for name, (t, p) in facts.items()},
        ),
    )
    assert main(["show", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["winner"], found["seconds"]) == ("numpy.gemm[tile=image]", 3.0)


def test_what_comes_along_of_other_devices_is_only_counted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, shipped = CPU.current().key, place / "shipped"
    shipped.mkdir()
    along = TuningCache(place / "another", system=None)
    for device in ("a-device", here, "b-device"):
        along.add(LAYER, device, race(**{"numpy.direct": 2.0}))
    along.export(shipped)
    monkeypatch.setattr("autoconv.cli.records.TuningCache", partial(TuningCache, system=shipped))

    def devices(*args: str) -> tuple[list[str], str]:
        assert main(["show", *args]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        return [line for line in lines if line in ("a-device", "b-device", here)], last

    counted = "records of other devices come with autoconv: `autoconv show --all` lists them"
    assert devices() == ([here], f"2 {counted}")
    TuningCache().add(LAYER, "b-device", race(2, **{"numpy.direct": 1.0}))
    assert devices() == ([here, "b-device"], f"1 {counted}")
    assert devices("--all")[0] == [here, "a-device", "b-device"]
    assert devices("--device", "cpu")[0] == [here]
    assert main(["show", "--json"]) == 0
    assert {entry["device"] for entry in json.loads(capsys.readouterr().out)} == {here, "a-device", "b-device"}


def test_info_names_the_device_the_cache_and_what_is_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert str(place / "cache") in text
    assert f"of compiled kernels: {machine_code.folder()}" in text
    assert re.search(r"missing +GPU: CuPy is not importable .*: pip install 'autoconv\[cuda13\]'", text)
    assert main(["info", "--device", "cuda"]) == 2
    assert "--device cuda: no CUDA device: CuPy is not importable" in capsys.readouterr().err
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["peak_gflops"]["float32"] > 0
    assert "numpy.direct" in found["algorithms"]
    assert found["cache"]["persistent"] is True
    assert found["cache"]["kernels_bytes"] > 0


def test_info_names_every_library_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    libraries = (*BASELINES.values(), *RUNTIMES.values())
    packages = {package for library in libraries for package in library.packages}
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in packages else found(name))
    assert main(["info", "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["missing"]
    assert packages == {"torch", "onnxruntime", "onnx", "openvino", "ncnn", "pnnx", "MNN"} <= missing.keys()
    assert missing["ncnn"] == "a library to compare with; pip install 'autoconv[bench]'"


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


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_merged(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(capsys=capsys)
    assert main(["export", "good.json"]) == 0
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(place / "other"))
    capsys.readouterr()
    for form in ([], ["--json"]):
        assert main(["import", "nope.json", "good.json", "tiny.yaml", *form]) == 1
        said = capsys.readouterr()
        assert said.err.count("\n") == 2
        assert said.err.startswith("autoconv: error: nope.json: cannot be read: No such file")
        assert "autoconv: error: tiny.yaml: expected JSON" in said.err
        if form:
            assert json.loads(said.out)["good.json"]["known"] == 2
        else:
            assert said.out == "good.json: 2 new, 0 merged, 0 known already\n"


# What it prints
