"""Every example of the README, the documentation and the docstrings runs, and what is said of the command holds."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from simt.emulator import MISSING
from simt.fake_cupy import FakeCuPy, forget, install

import autoconv
from autoconv import ConvLayer, TuningCache, networks, registry
from autoconv.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pages").glob("*.md")}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = '"""autoconv/cpu/product.py'  # how the file begins that add-an-algorithm.md shows
NEEDS = {
    "torch": r"\btorch\b",
    "cupy": r"\bcupy\b|\bon_gpu\b",
    "onnx": r"\bonnx\b",
}  # what a block says that needs one of these


def blocks(page: str, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def needs(block: str) -> str:
    return next((name for name, words in NEEDS.items() if re.search(words, block)), "")


def run(page: str, library: str, names: dict[str, Any]) -> None:
    """The blocks of a page that need this library (or none), one after the other, in one namespace."""
    for block in blocks(page, "python"):
        if needs(block) == library and not block.startswith(EXAMPLE):
            exec(compile(block, page, "exec"), names)


WITH_PYTHON = sorted(page for page in PAGES if any(not b.startswith(EXAMPLE) for b in blocks(page, "python")))
ASIDE = [(page, name) for page in WITH_PYTHON for name in NEEDS if name in map(needs, blocks(page, "python"))]


@pytest.fixture
def families(request: pytest.FixtureRequest) -> None:
    """All of them with `--full`; every day only NumPy's, which compiles nothing."""
    if not request.config.getoption("full"):
        request.getfixturevalue("numpy_alone")


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run(page, "", names)
    printed = capsys.readouterr().out
    assert ("GFLOP/s" in printed) == ("print(plan.explain())" in PAGES[page])
    if page == "README.md":
        assert names["dx"].shape == names["x"].shape
        assert names["dw"].shape == names["w"].shape
        right = np.maximum(autoconv.conv2d(names["x"], names["w"], padding=1), 0)
        scale = np.abs(names["x"]).max() * np.abs(names["w"]).sum(axis=(1, 2, 3)).max()
        np.testing.assert_allclose(names["y"], right, atol=1e-5 * scale)


@pytest.mark.parametrize(("page", "library"), ASIDE)
def test_the_examples_with_other_libraries_run(
    page: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"np": np, "autoconv": autoconv}
    if library == "cupy":
        if MISSING:
            pytest.skip("NOT CHECKED: the emulator of CUDA needs g++")
        request.addfinalizer(forget)
        install(FakeCuPy(), monkeypatch)
    elif importlib.util.find_spec(library) is None:
        pytest.skip(f"NOT CHECKED: {library} is not installed")
    run(page, library, names)


def test_the_algorithm_of_the_example_is_verified_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = (block for block in blocks("add-an-algorithm.md", "python") if block.startswith(EXAMPLE))
    (tmp_path / "product.py").write_text(source)
    spec = importlib.util.spec_from_file_location("autoconv.cpu.product", tmp_path / "product.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "autoconv.cpu.product", module)
    spec.loader.exec_module(module)
    offered = (*registry.algorithms(autoconv.CPU.current()), *module.ALGORITHMS)
    monkeypatch.setattr(registry, "_table", lambda kind: offered)
    monkeypatch.setattr(module.Product, "version", "of this test")  # it is no file of the package
    cache = TuningCache(tmp_path / "cache", system=None)
    layer = ConvLayer(N=2, C=16, H=7, W=9, K=8, R=1, S=1)
    plan = autoconv.plan(layer, cache=cache)
    assert plan.facts["product"].timed
    assert plan.facts["product"].error < 2e-6
    named = autoconv.plan(layer, "product", cache=cache)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(layer.x_shape, np.float32), rng.standard_normal(layer.w_shape, np.float32)
    np.testing.assert_allclose(named.run(x, w), np.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0]), rtol=1e-4, atol=1e-4)
    other = autoconv.plan(layer.replace(R=3, S=3, padding=1), "heuristic", cache=cache)
    assert other.reasons["product"] == ["R=3, S=3: expected 1x1 filters", "stride, padding: expected 1 and 0"]
    fused = autoconv.plan(layer.replace(bias=True), "heuristic", cache=cache)
    assert fused.reasons["product"] == ["epilogue: expected none, got bias, residual or activation"]


PACKAGE = Path(autoconv.__file__).parent
WITH_EXAMPLES = [
    ".".join(("autoconv", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_of_docstrings_run(module: str) -> None:
    if module.startswith("autoconv.torch."):
        pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_the_yaml_examples_are_networks(tmp_path: Path) -> None:
    (text,) = (block for page in sorted(PAGES) for block in blocks(page, "yaml"))
    (tmp_path / "net.yaml").write_text(text)
    net = networks.load(tmp_path / "net.yaml")
    assert [(named.layer.P, named.layer.Q, named.repeat) for named in net.layers] == [(32, 32, 1), (32, 32, 4)]


# Shell

LINES = [
    (page, line)
    for page in sorted(PAGES)
    for block in blocks(page, "sh", "bash")
    for line in re.sub(r"\\\n\s*", "", block).splitlines()
]
CHEAP = ("explain", "show", "info", "export", "import")  # they time nothing
GATE = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def words(line: str) -> list[str]:
    """A line's words, without variables and comments, and `autoconv` for the ways to call it."""
    found = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_0-9]+=", word)]
    return ["autoconv", *found[3:]] if found[:3] == ["python", "-m", "autoconv"] else found


@pytest.mark.parametrize(("page", "line"), [(p, line) for p, line in LINES if words(line)[:1] == ["autoconv"]])
def test_commands_are_understood_and_cheap_ones_run(
    page: str, line: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = words(line)[1:]
    command = cli.commands[name]
    if name == "import":  # what the line before has written
        monkeypatch.chdir(tmp_path_factory.mktemp("import"))
        TuningCache(system=None).export(Path(arguments[0]))
    else:
        monkeypatch.chdir(tmp_path_factory.mktemp(name))
    if name in CHEAP:
        result = CliRunner().invoke(cli, [name, *arguments])
        assert result.exit_code == 0, result.output
        assert result.output
    else:
        context = command.make_context(name, list(arguments))
        assert isinstance(context, click.Context)
        for net in context.params.get("nets") or context.params.get("suites") or ():
            assert networks.load(ROOT / net if net.endswith(".yaml") else net).layers


def test_the_set_up_is_two_commands_that_the_gate_runs() -> None:
    prefixes = re.findall(r'readme "([^"]+)"', GATE)
    assert [block.count("\n") for block in blocks("README.md", "sh")] == [1, 1]
    for block in blocks("README.md", "sh"):
        assert any(block.startswith(prefix) for prefix in prefixes)


def test_the_gate_works_in_a_folder_whose_name_has_spaces() -> None:
    """What a step has bash read once more stays one word."""
    (quoted,) = re.findall(r"^quoted=.*$", GATE, re.MULTILINE)
    steps = re.findall(r"^ *step .*$", GATE, re.MULTILINE)
    script = ["work='/first second'", quoted, "step() { printf '%s\\n' \"$*\"; }", *steps]
    said = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, check=True).stdout
    found = [word for line in said.splitlines() for word in shlex.split(line)]
    assert sum("/first second/" in word for word in found) > 5
    assert not any(word.startswith("second") for word in found)


@pytest.mark.parametrize(("page", "line"), [(p, line) for p, line in LINES if words(line)[:1] != ["autoconv"]])
def test_other_commands_name_what_there_is(page: str, line: str) -> None:
    tool = words(line)[0].removeprefix(".venv/bin/")
    assert tool in ("python", "python3", "pip", "mkdocs"), "a command that nothing checks"
    for extras in re.findall(r"'\.\[([\w,]+)\]'", line):
        assert set(extras.split(",")) <= EXTRAS.keys()
    for path in re.findall(r"\b(?:tests|docs|configs)/[\w./-]+", line):
        assert (ROOT / path).exists()
    if tool == "mkdocs":
        assert "mkdocs build" in GATE


# What the pages say


def test_every_command_and_network_is_mentioned() -> None:
    for name in cli.commands:
        assert f"autoconv {name} " in PAGES["README.md"]
        assert f"autoconv {name} " in PAGES["command.md"]
    for name in networks.names():
        assert f"`{name}`" in PAGES["command.md"]


def test_the_readme_is_short_and_says_first_how_little_a_gpu_has_run() -> None:
    assert PAGES["README.md"].count("\n") < 200
    said = " ".join(PAGES["README.md"].split("\n\n")[1].split())
    assert "in half an hour; an H200 has run it for twenty minutes, and no other GPU has" in said


@pytest.mark.parametrize("page", sorted(PAGES))
def test_files_that_pages_name_are_there(page: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs" / "pages"
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []
    scripts = re.findall(r"`python ([\w/]+\.py)`", PAGES[page])
    assert [script for script in scripts if not (ROOT / script).exists()] == []


ENTRY = re.compile(r"- \*\*(?P<terms>[^*]+(?:\*[^*]+)*?)\*\*: (?P<meaning>.+)")
FIELD = """
polyphase; sub-pixel; interleave; deinterleave; packed panel; epilogue; remainder; register tile; outer-product GEMM;
correlation; stride; dilation; offset; cooperative batch; L2; LLC; pointer launder; arithmetic fence; segment;
minimal filtering F(m, r); overlap-save; im2col; implicit GEMM; split-K; direct; dgrad; wgrad; workspace; roofline;
race; candidate; plan; hot; cold; NaN fence; pruned; wake; rotated by 180 degrees; family; baseline; worker; record
"""


def test_every_term_of_the_glossary_has_one_line_and_a_source() -> None:
    entries = [line for line in PAGES["glossary.md"].splitlines() if line.startswith("- ")]
    found = [ENTRY.fullmatch(line) for line in entries]
    assert None not in found
    source = re.compile(r"\. (Our own.*: )?\[.+\]\(.+\)|\. [A-Z][\w ,.-]+, \*.+\*, .*\d{4}.*")  # a link, or a book
    assert [line for line in entries if not source.search(line)] == []
    titles = ", ".join(entry["terms"] for entry in found if entry is not None)
    assert [term for term in re.split(r";\s+", FIELD.strip()) if term not in titles] == []
    names = [term for entry in found if entry is not None for term in entry["terms"].split(", ")]
    assert len(names) == len(set(names))


def test_the_site_names_every_page_and_refers_to_no_other_host() -> None:
    settings = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    assert PAGES.keys() - {"README.md"} == set(re.findall(r": ([\w-]+\.md)$", settings, re.MULTILINE))
    assert "font: false" in settings
    assert "://" not in settings
    assert not [page for page, text in PAGES.items() if re.search(r"!\[[^]]*\]\(https?:|<(img|script|link)\b", text)]
