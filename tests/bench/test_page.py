"""The tables of the documentation are those of the results that are stored."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from autoconv.bench.networks.pytorch import FILES
from autoconv.bench.networks.race import FILE

ROOT = Path(__file__).parents[2]
RESULTS = sorted(
    path for path in (ROOT / "docs" / "results").glob("*/*.json") if path.name not in (FILE, *FILES.values())
)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_page", ROOT / "docs" / "benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_results(generator: ModuleType) -> None:
    for page in generator.PAGES:
        assert generator.written(page) == page.read_text(encoding="utf-8"), f"{page}: run docs/benchmarks.py"


def test_every_result_is_on_a_processor_of_the_page(generator: ModuleType) -> None:
    assert RESULTS
    assert {path.parent.name for path in RESULTS} == set(generator.PROCESSORS)
    for path in RESULTS:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert not result["incomplete"] or result["suite"] != generator.SUITE, path


def test_a_loss_is_bold_and_a_partial_mean_has_its_count(generator: ModuleType) -> None:
    behind = {"median": 0.9, "low": 0.8, "high": 0.96, "layers": 3}
    assert generator.cell(behind, 3) == "**0.90**"
    assert generator.cell(behind | {"high": 0.98}, 4) == "0.90 (3)"
    assert generator.cell(None) == "-"
