"""Results line by line: what was cut short costs its own line, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.bench import exhaustive, lines
from autoconv.layer import ConvLayer
from autoconv.records.schema import Facts


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert lines.read(path) == []
    for _ in range(2):
        with lines.adding(path) as add:
            add({"a": 1})
            assert lines.read(path)[-1] == {"a": 1}, "at once"
        path.write_bytes(path.read_bytes()[:-4])
    assert lines.read(path) == []
    with lines.adding(path) as add:
        add(2)
        add(3)
    assert path.read_bytes().splitlines() == [b'{"a":', b'{"a":', b"2", b"3"]
    assert lines.read(path) == [2, 3]


def test_a_grid_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    device = registry.this_device()
    direct = next(a for a in registry.algorithms(device) if a.name == "numpy.direct")
    facts = [Facts(version=version, failure="no").to_json() for version in ("of other code", direct.version)]
    written = [{"candidate": str(Candidate("numpy.direct", (("n", n),))), "facts": f} for n, f in enumerate(facts)]
    path = tmp_path / "grid.jsonl"
    path.write_text("\n".join(map(json.dumps, written)) + '\n{"candidate": "gem')
    assert list(exhaustive.read(path)) == [Candidate("numpy.direct", (("n", 1),))]


def test_a_grid_is_that_of_the_layer_as_its_list_states_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(exhaustive, "extend", lambda path, layer, *rest: seen.append(layer) or [layer])
    (tmp_path / "own.yaml").write_text("layers: [{name: up, C: 8, H: 6, K: 8, R: 3, batch: 4, direction: dgrad}]")
    asked = [f"{tmp_path / 'own.yaml'}:up", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(exhaustive.main, asked, catch_exceptions=False)
    assert "1 candidates are left" in done.output
    assert [(layer.N, layer.direction) for layer in seen] == [(4, "dgrad")]


def test_times_of_a_grid_are_stated_at_the_pace_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slowing:
        """A worker that knows at the end that all before took twice as long."""

        def __init__(self, device: object) -> None:
            self.known: dict[Candidate, Facts] = {}

        def begin(self, layer: ConvLayer) -> Slowing:
            return self

        def enter(self, block: list[Candidate]) -> dict[Candidate, Facts]:
            found = {candidate: Facts("1", time=1.0, samples=3) for candidate in block}
            self.known |= found
            return found

        def finish(self) -> dict[Candidate, Facts]:
            return {candidate: replace(facts, time=2.0) for candidate, facts in self.known.items()}

        def close(self) -> None:
            pass

    grid = [Candidate("numpy.direct", (("n", n),)) for n in range(11)]
    monkeypatch.setattr(exhaustive, "Worker", Slowing)
    monkeypatch.setattr(exhaustive, "whole_grid", lambda layer, device: grid)
    path, layer = tmp_path / "grid.jsonl", ConvLayer(N=1, C=1, H=1, W=1, K=1, R=1, S=1)
    assert exhaustive.extend(path, layer, registry.this_device(), 60.0) == []
    times = [line["facts"]["time"] for line in lines.read(path)]
    assert times == [1.0] * len(grid) + [2.0] * len(grid), "the last line of a candidate counts"
