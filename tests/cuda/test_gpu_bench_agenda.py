"""What a run on hardware does in which order, how long that takes, and what another day does again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_gpus import LAYER, WANTED, Narrow
from simt.emulator import MISSING

from autoconv.bench.gpu import RESULTS, preview
from autoconv.bench.gpu.agenda import FIRST, compared_after, items, targets, timetable
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.cli import main
from autoconv.registry import algorithms, code_of

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


def test_the_targets_are_of_the_networks_longest_first() -> None:
    found = {target.name: target.layers for target in targets()}
    assert list(found)[:2] == ["float32, 3x3 and 5x5", "float32"]
    assert set(found["float32, 3x3 and 5x5"]) < set(found["float32"])
    assert found["float32"][0].flops > found["float32"][-1].flops
    assert {x.layout for x in found["bfloat16, NHWC"]} == {"NHWC"}
    assert {x.N for layers in found.values() for x in layers} <= {8, 32}
    assert all(not x.has_epilogue for layers in found.values() for x in layers)


def test_targets_are_what_their_names_say_of_whatever_list(tmp_path: Path) -> None:
    net = tmp_path / "net.yaml"
    net.write_text("{name: last, layers: [{name: one, C: 4, H: 3, K: 2, R: 3, layout: NHWC}]}", encoding="utf-8")
    for target in targets([str(net)]):
        named = target.name.replace(",", "").split()
        (layer,) = target.layers
        assert layer.dtype == named[0]
        assert layer.layout == (named[1] if named[1:] and named[1] in ("NCHW", "NHWC") else "NHWC")


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8"])
def test_a_list_of_another_type_is_refused_by_name(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = tmp_path / "net.yaml"
    net.write_text(f"{{name: Odd, layers: [{{name: one, C: 4, H: 3, K: 2, R: 3, dtype: {dtype}}}]}}", encoding="utf-8")
    assert main(["bench", str(net), "--device", "cuda", "--dry-run", "-o", str(tmp_path / "out")]) == 2
    told = f"Odd: layer 'one': dtype='{dtype}': expected 'float32', from which layers of other types are derived"
    assert capsys.readouterr().err == f"autoconv: error: {told}\n"


def test_every_target_has_figures_early() -> None:
    """After a third of three quarters of an hour, by the guesses, the longest layers of each target are compared."""
    table, wanted = algorithms(Narrow(capability=90)), targets()
    work = list(items(("check", "tune", "table"), table, wanted))
    assert len(set(work)) == len(work)
    compared = compared_after(timetable(work, table, []), [])
    for target in wanted:
        assert all(compared[layer.key()] <= 900 for layer in target.layers[:FIRST]), target.name
        assert all(layer.key() in compared for layer in target.layers)
    halves = [i for i in work if i.startswith("tune/hybrid/fwd-float16-NHWC")]
    brains = [i for i in work if i.startswith("tune/hybrid/fwd-bfloat16-NHWC")]
    assert [i.replace("float16", "bfloat16") for i in halves] == brains
    assert all(work.index(half) < work.index(brain) for half, brain in zip(halves, brains, strict=True))


def test_a_dry_run_says_what_is_left_and_learns_from_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = preview(tmp_path, ("tune", "table"), 60, WANTED)
    whole = [f"tune/hybrid/{LAYER.key()}", f"table/hybrid/{LAYER.key()}"]
    assert [line.split()[1] for line in lines[:4]] == ["machine", "warm", *whole]
    assert lines[-2] == "small: figures after   0:47; 1 of 1 layers within the budget"
    seconds = {"warm": 1.0, f"table/hybrid/{LAYER.replace(N=2).key()}": 1.0, whole[0]: 400.0}
    (tmp_path / RESULTS).write_text("".join(f'{{"item": "{i}", "seconds": {s}}}\n' for i, s in seconds.items()))
    lines = preview(tmp_path, ("tune", "table"), 60, WANTED)
    assert [line.split()[1] for line in lines[:2]] == ["machine", whole[1]]
    assert lines[-1].startswith("4 items, expected to take   6:")
    command = ["bench", "alexnet", "--device", "cuda", "-o", str(tmp_path / "new"), "--dry-run", "--phase", "check"]
    assert main(command) == 0
    assert "float32: figures never; 0 of 5 layers within the budget" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_what_failed_is_tried_again_with_other_kernels(tmp_path: Path) -> None:
    tune, table = (f"{kind}/hybrid/{LAYER.key()}" for kind in ("tune", "table"))
    codes = {tune: code_of(algorithms(NOMINAL)), table: "of another day"}
    lines = [{"item": i, "code": code, "failure": "no", "seconds": 1.0} for i, code in codes.items()]
    (tmp_path / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = [line.split()[1] for line in preview(tmp_path, ("tune", "table"), 60, WANTED)[:-2]]
    assert table in work
    assert tune not in work
