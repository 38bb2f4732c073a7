"""`collect`: what a program plans without a record ends in a layer list, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import exit_code, forks
from hypothesis import given
from hypothesis import strategies as st
from layers import layers as conv_layers

import autoconv
import autoconv.tuning.planner
from autoconv import ConvLayer, TuningCache, networks, plan
from autoconv.cli.options import jobs_of
from autoconv.errors import CacheWarning, ConfigError
from autoconv.networks import yaml_reader
from autoconv.networks.collect import VARIABLE, Collection, extended
from autoconv.networks.yaml_writer import text_of

pytestmark = pytest.mark.usefixtures("numpy_alone")

LAYER = ConvLayer(N=1, C=2, H=6, W=5, K=3, R=3, S=3, padding=1)


def listed(path: Path) -> list[ConvLayer]:
    return [layer for *_, layer in jobs_of([networks.load(path)], None, None)]


def test_layers_without_a_record_are_listed_with_their_batches_and_directions(tmp_path: Path) -> None:
    path, cache = tmp_path / "untuned.yaml", TuningCache(tmp_path / "cache", system=None)
    known = LAYER.replace(K=5)
    plan(known, "hybrid", cache=cache, budget=0.05, vendors=False, exact=True)
    plan(LAYER, "heuristic", cache=cache)  # before: it is used again below
    with autoconv.collect(path):
        plan(known, "heuristic", cache=cache, vendors=False, exact=True)
        plan(LAYER, "heuristic", cache=cache)
        plan(LAYER, "numpy.direct", cache=cache)
        plan(LAYER.replace(K=7), "numpy.direct", cache=cache)
        wanted = [LAYER, LAYER.replace(N=8), LAYER.replace(direction="dgrad"), LAYER.replace(direction="wgrad")]
        for layer in wanted[1:]:
            plan(layer, "heuristic", cache=cache)
    assert not autoconv.tuning.planner._watchers
    assert sorted(map(str, listed(path))) == sorted(map(str, wanted))
    assert len(networks.load(path).layers) == 2, "equal batches share a line"


def test_what_is_timed_now_had_no_record(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "cache", system=None)
    with autoconv.collect(tmp_path / "untuned.yaml"):
        plan(LAYER, "hybrid", cache=cache, budget=0.05, vendors=False, exact=True)
    assert listed(tmp_path / "untuned.yaml") == [LAYER]


def test_a_list_that_is_there_stays_and_a_failing_program_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "untuned.yaml"
    path.write_text("batch: [1, 2]\nlayers: [{name: own, C: 2, H: 9, K: 2, R: 3, repeat: 2}]\n")

    def fail() -> None:
        with autoconv.collect(path):
            plan(LAYER, "heuristic")
            raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="the program's own"):
        fail()
    own = ConvLayer(N=1, C=2, H=9, W=9, K=2, R=3, S=3)
    assert set(listed(path)) == {own, own.replace(N=2), LAYER}


def test_a_list_that_is_there_keeps_its_names_repeats_and_title(tmp_path: Path) -> None:
    path = tmp_path / "untuned.yaml"
    path.write_text(
        "# a comment\nname: Mine\nsource: a paper\nbatch: [1, 2]\nlayers:\n"
        "  - {name: layer2, C: 2, H: 9, K: 2, R: 3, repeat: 2}\n"
    )
    (own,) = networks.load(path).layers
    before = path.read_text()
    with autoconv.collect(path):
        plan(own.at(2), "heuristic")
    assert path.read_text() == before, "there is nothing new"
    with autoconv.collect(path):
        for layer in (own.at(2), LAYER, LAYER.replace(K=7), LAYER.replace(N=8)):
            plan(layer, "heuristic")
    net = networks.load(path)
    assert (net.name, net.source, net.batches) == ("Mine", "a paper", (1, 2))
    kept, *new = net.layers
    assert (kept.name, kept.layer, kept.repeat, kept.batches, kept.directions) == ("layer2", own.layer, 2, (), ())
    assert [(named.name, named.layer, named.batches) for named in new] == [
        ("layer1", LAYER, (1, 8)),
        ("layer3", LAYER.replace(K=7), (1,)),
    ]


def test_a_list_of_any_name_and_of_many_images_is_read_again(tmp_path: Path) -> None:
    path, cache = tmp_path / f"{'long' * 55}\n.yaml", TuningCache(tmp_path / "cache", system=None)
    wanted = [ConvLayer(N=n, C=1, H=1, W=1, K=1, R=1, S=1) for n in (2, 2**31 - 1)]
    for layer in wanted:
        with autoconv.collect(path):
            plan(layer, "heuristic", cache=cache, build=False)
    assert listed(path) == wanted


def test_a_list_that_is_full_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "untuned.yaml"
    path.write_text("layers: [{name: own, C: 2, H: 9, K: 2, R: 3}]\n")
    before = path.read_text()
    monkeypatch.setattr(yaml_reader, "LARGEST_FILE", len(before))

    def program() -> None:
        with autoconv.collect(path):
            plan(LAYER, "heuristic")

    with pytest.warns(CacheWarning, match=r"untuned.yaml: 1 of 1 layers are left out"):
        program()
    assert path.read_text() == before


def test_nothing_is_written_where_nothing_is_missing(tmp_path: Path) -> None:
    with autoconv.collect(tmp_path / "untuned.yaml"):
        plan(LAYER, "numpy.direct")
    assert list(tmp_path.glob("*untuned*")) == []


@given(st.lists(conv_layers(), min_size=1, max_size=6))
def test_every_layer_can_be_read_back(layers: list[ConvLayer]) -> None:
    written = text_of(extended(networks.Network("some", "", ()), layers))
    net = yaml_reader.network(written.encode(), "some.yaml", "")
    assert set(layers) == {layer for *_, layer in jobs_of([net], None, None)}


def test_a_list_holds_no_more_than_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_reader, "LARGEST_FILE", 600)

    def program() -> None:
        with autoconv.collect(tmp_path / "untuned.yaml"):
            for K in range(1, 10):
                plan(LAYER.replace(K=K), "heuristic")

    with pytest.warns(CacheWarning, match=r"untuned.yaml: \d of 9 layers are left out"):
        program()
    assert listed(tmp_path / "untuned.yaml")[0].K == 1


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("hello\n")
    for name, message in {
        "none/untuned.yaml": "there is no folder",
        "other.yaml": "a network: expected a mapping",
        ".": "cannot be read: Is a directory",
        "a\0.yaml": "cannot be read: embedded null",
    }.items():
        with pytest.raises(ConfigError, match=message), autoconv.collect(tmp_path / name):
            raise AssertionError("not reached")


@pytest.mark.parametrize("path", [None, 3, b"untuned.yaml"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"path=.*: expected a path, as str or Path"), autoconv.collect(path):
        raise AssertionError("not reached")


def test_a_place_is_of_no_interest_before_there_is_something_to_keep(tmp_path: Path) -> None:
    collection = Collection(tmp_path / "none" / "untuned.yaml")
    collection.note(plan(LAYER, "numpy.direct"))
    with pytest.raises(ConfigError, match="there is no folder"):
        collection.note(plan(LAYER, "heuristic"))


def test_the_exception_of_a_block_is_not_hidden_by_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "untuned.yaml"
    path.parent.mkdir()

    def program(*, fail: bool) -> None:
        with autoconv.collect(path):
            plan(LAYER, "heuristic")
            path.parent.rmdir()
            if fail:
                raise KeyError("the program's own")

    with pytest.raises(KeyError, match="own"), pytest.warns(CacheWarning, match="untuned.yaml: cannot be written: No"):
        program(fail=True)
    path.parent.mkdir()
    with pytest.raises(ConfigError, match=r"untuned.yaml: cannot be written: No"):
        program(fail=False)
    assert not autoconv.tuning.planner._watchers


PROGRAM = """
import autoconv, numpy as np
x, w = np.ones((4, 2, 6, 5), np.float32), np.ones((3, 2, 3, 3), np.float32)
autoconv.conv2d(x, w, padding=1, mode="heuristic")
"""


def ran(folder: Path, name: str, *program: str) -> subprocess.CompletedProcess[str]:
    """A program that has ended, in a folder, with the variable set."""
    environment = os.environ | {VARIABLE: name, "PYTHONPATH": str(Path(autoconv.__file__).parents[1])}
    command = [sys.executable, *program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_variable_collects_for_the_whole_process(tmp_path: Path) -> None:
    done = ran(tmp_path, "untuned.yaml", "-c", PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    assert listed(tmp_path / "untuned.yaml") == [LAYER.replace(N=4)]
    failed = ran(tmp_path, "none/untuned.yaml", "-c", PROGRAM)
    assert f"none/untuned.yaml: there is no folder {tmp_path / 'none'}" in failed.stderr


def test_what_cannot_be_written_at_the_exit_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = ran(tmp_path, "folder/untuned.yaml", "-c", PROGRAM + "import os; os.rmdir('folder')")
    assert done.returncode == 0
    assert "CacheWarning: folder/untuned.yaml: cannot be written: No such file" in done.stderr
    assert "Traceback" not in done.stderr


GONE = """
import os, tempfile
os.chdir(folder := tempfile.mkdtemp())
os.rmdir(folder)
import autoconv
with autoconv.collect("other.yaml"):
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a working directory cannot be removed")
def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    warned, *_, last = ran(tmp_path, "untuned.yaml", "-c", GONE).stderr.splitlines()
    expected = "expected a path from the root, as the working directory is gone: No such file or directory"
    assert warned.endswith(f"CacheWarning: {VARIABLE}: untuned.yaml: {expected}")
    assert last == f"autoconv.errors.ConfigError: other.yaml: {expected}"


WORKERS = """
import autoconv, multiprocessing, sys
layer = autoconv.ConvLayer(N=1, C=2, H=6, W=5, K=3, R=3, S=3, padding=1)

def work(n):
    autoconv.plan(layer.replace(N=n), "heuristic", build=False)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        pool.map(work, [1, 2, 3])
"""


@forks
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_are_ended_have_written_what_they_used(tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(WORKERS)
    done = ran(tmp_path, "untuned.yaml", "program.py", method)
    assert (done.returncode, done.stderr) == (0, "")
    assert {layer.N for layer in listed(tmp_path / "untuned.yaml")} == {1, 2, 3}


def test_the_order_of_a_list_of_networks_is_by_batch_then_direction() -> None:
    jobs = jobs_of([networks.load("cifar10")], (1, 8), ("fwd", "dgrad"))
    found = [(job.layer.N, job.layer.direction, job.named.name) for job in jobs]
    names = ["conv1", "conv2", "conv3"]
    assert found == [(n, way, name) for n in (1, 8) for way in ("fwd", "dgrad") for name in names]
    assert np.all([job.named.at(job.batch, job.layer.direction) == job.layer for job in jobs])


@forks
def test_a_child_forked_while_another_thread_notes_a_layer_can_write(tmp_path: Path) -> None:
    collection = Collection(tmp_path / "untuned.yaml")
    collection.note(plan(LAYER, "heuristic", cache=TuningCache(tmp_path / "cache", system=None)))

    def write() -> int:
        collection.write()
        return 0

    with collection._lock:
        assert exit_code(write) == 0
    assert listed(tmp_path / "untuned.yaml") == [LAYER]
