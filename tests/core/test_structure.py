"""The house stands: imports go down, nothing goes round in a circle, and no room is overfull."""

from __future__ import annotations

import graphlib
import re
from importlib import import_module
from pathlib import Path

import grimp
import pytest

import autoconv

PACKAGE = Path(autoconv.__file__).parent
KINDS = ("cpu", "cuda")

# From the top: a room imports from those below it, and from none beside it.
LAYERS: dict[str, tuple[set[str], ...]] = {
    "autoconv": (
        {"cli"},
        {"bench"},
        {"torch"},
        {"functional"},
        {"networks"},
        {"tuning"},
        {"registry"},
        {"vendors", "cpu", "cuda"},
        {"plans"},
        {"records"},
        {"device"},
        {"algorithm"},
        {"accuracy"},
        {"layer"},
        {"common"},
        {"paths"},
        {"errors"},
    ),
    "autoconv.cpu": (
        {"fused"},
        {
            "direct",
            "winograd",
            "fft",
            "gemm",
            "gemm_packed",
            "depthwise",
            "matrix",
            "int8",
            "numpy",
            "extensions",
            "operators",
        },
        {"transform"},
        {"common"},
        {"device"},
        {"machine"},
        {"hardware", "pool"},
        {"allocator", "codegen", "permission", "threads"},
        {"cgroup"},
    ),
    "autoconv.cuda": (
        {"direct", "stem", "winograd", "fft", "depthwise", "operators"},
        {"gemm"},
        {"hopper"},
        {"device"},
        {"hardware", "timing"},
        {"libraries"},
        {"common"},
        {"codegen"},
    ),
    "autoconv.networks": (
        {"compiled"},
        {"choice", "files", "collect", "torch_reader"},
        {"run", "onnx_reader"},
        {"passes", "normalisation"},
        {"layer_list", "quantization", "translation"},
        {"reference", "yaml_writer"},
        {"graph", "yaml_reader"},
        {"operators", "layers"},
    ),
    "autoconv.cli": (
        {"main"},
        {"tune", "explain", "networks", "figures", "records", "info", "bench"},
        {"tables"},
        {"options", "output"},
    ),
    "autoconv.bench": (
        {"exhaustive", "networks", "strategies", "report"},
        {"gpu"},
        {"race", "display"},
        {"agreement", "results", "exported", "bound"},
        {"suites"},
        {"statistics", "lines"},
        {"baselines"},
    ),
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import, those inside functions too, but not those for types alone; and those that stand in a text."""
    found = grimp.build_graph("autoconv", exclude_type_checking_imports=True, cache_dir=None)
    for kind in KINDS:
        for family in import_module(f"autoconv.{kind}").FAMILIES:
            found.add_import(importer="autoconv.registry", imported=f"autoconv.{kind}.{family}")
    for path in PACKAGE.rglob("*.py"):
        importer = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r'"(autoconv(?:\.\w+)+)"', path.read_text(encoding="utf-8")):
            if (
                name in found.modules
                and name != importer
                and name not in found.find_modules_directly_imported_by(importer)
            ):
                found.add_import(importer=importer, imported=name)
    return found


def test_no_module_imports_itself_by_way_of_others(graph: grimp.ImportGraph) -> None:
    graphlib.TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()


@pytest.mark.parametrize("room", LAYERS)
def test_imports_go_down(graph: grimp.ImportGraph, room: str) -> None:
    layers = [grimp.Layer(*(f"{room}.{name}" for name in layer), independent=True) for layer in LAYERS[room]]
    wrong = graph.find_illegal_dependencies_for_layers(layers)
    assert not wrong, [f"{d.importer} -> {d.imported}" for d in wrong]


def test_every_module_has_a_layer() -> None:
    for room, layers in LAYERS.items():
        folder = PACKAGE.joinpath(*room.split(".")[1:])
        there = {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
        assert {name for layer in layers for name in layer} == {n for n in there if not n.startswith("__")}, room


def test_rooms_are_not_overfull() -> None:
    def entries(folder: Path) -> list[Path]:
        return [p for p in folder.iterdir() if p.name != "__pycache__"]

    assert len(entries(PACKAGE)) <= 22
    for folder in (PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir() and p.name != "__pycache__")):
        sources = [p for p in entries(folder) if p.suffix in (".py", ".cu", ".cuh")]
        assert len(sources) <= (22 if folder == PACKAGE else 12), folder
        for path in sources:
            assert path.read_text(encoding="utf-8").count("\n") <= 400, path
    tests = Path(__file__).parents[1]
    for path in tests.rglob("*.py"):
        assert path.read_text(encoding="utf-8").count("\n") <= 600, path


def test_files_of_tests_have_different_names() -> None:
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(names) == len(set(names)), "pytest imports files of tests by their names alone"
