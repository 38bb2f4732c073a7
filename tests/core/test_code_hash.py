"""Versions of code: what an edit changes, and what it does not."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from autoconv.common import code_hash
from autoconv.common.code_hash import PACKAGE, _file_of, _imports, cuda_code, python_code

ROOT = Path(__file__).parents[2]
KINDS = ("cpu", "cuda")

VENDORS = sorted(path.relative_to(ROOT / "autoconv").as_posix() for path in (ROOT / "autoconv/vendors").glob("*.py"))

Versions = dict[str, str]  # by family


# --- the code of a file ---------------------------------------------------------------------------------------

SOURCE = r'''"""What it is."""

import os

NAMES = (
    "no docstring"
    # of two lines
    'either'
)


class A:
    """A class."""

    x = 1  # one

    def f(self, s):
        """A method,

        of several lines.
        """
        # why
        text = """no docstring"""  # but a value
        text += \
            ""
        return text + "#" + s + 'it\'s "#"' + """ "# "" """[2:3]
'''

SAME = {
    "a comment": ("# why", "# why not, and at length"),
    "no comment": ("        # why\n", ""),
    "a comment at the end of a line": ("x = 1  # one", "x = 1"),
    "the module's docstring": ('"""What it is."""', '"""What it was."""'),
    "no docstring of the module": ('"""What it is."""\n', ""),
    "the docstring of a class": ('"""A class."""', '"""Another\n    class."""'),
    "the docstring of a method": ("of several lines", "of\n        many lines"),
    "blank lines": ("import os\n\n", "\n\nimport os\n\n\n\n"),
    "spaces at the end of a line": ("x = 1  # one", "x = 1   "),
}
OTHER = {
    "a number": ("x = 1", "x = 2"),
    "a text that is no docstring": ('"""no docstring', '"""no doc string'),
    "a text on lines of its own": ("'either'", "'neither'"),
    "a text on a continued line": ('""\n', '"?"\n'),
    "a hash sign between quotes": ('"# ""', '"##""'),
    "a hash sign in a text": ('"#"', '"##"'),
    "a name": ("def f", "def g"),
    "an import": ("import os", "import re"),
}


@pytest.mark.parametrize("edit", SAME)
def test_what_is_no_code_does_not_count(edit: str) -> None:
    edited = SOURCE.replace(*SAME[edit])
    assert edited != SOURCE
    assert python_code(edited) == python_code(SOURCE)


@pytest.mark.parametrize("edit", OTHER)
def test_what_is_code_counts(edit: str) -> None:
    edited = SOURCE.replace(*OTHER[edit])
    assert edited != SOURCE
    assert python_code(edited) != python_code(SOURCE)


def test_what_is_left_is_the_same_code() -> None:
    names: dict[str, type] = {}
    exec(compile(python_code(SOURCE.replace("# why", "pass")), "code", "exec"), names)
    assert names["A"]().f("!") == """no docstring#!it's "#"#"""
    assert names["NAMES"] == "no docstringeither"


def test_comments_of_cuda_do_not_count_and_its_code_does() -> None:
    text = "// a kernel\n#define N 3  // of them\n\n/* at\nlength */ __global__ void f() { N; }\n"
    assert cuda_code(text) == "#define N 3\n __global__ void f() { N; }"
    assert cuda_code(text.replace("a kernel", "the kernel").replace("at\n", "")) == cuda_code(text)
    assert cuda_code(text.replace("N 3", "N 4")) != cuda_code(text)


def imported(text: str, names: Collection[str]) -> list[str]:
    """The files that a module imports, by its syntax tree."""
    found: set[str] = set()
    left: list[Any] = [ast.parse(text)]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            left += node.orelse
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoconv"):
            for alias in node.names:
                found.add(_file_of(f"{node.module}.{alias.name}", names) or _file_of(str(node.module), names))
        elif isinstance(node, ast.Import):
            found |= {_file_of(alias.name, names) for alias in node.names}
        else:
            left += (
                n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt | ast.excepthandler | ast.match_case)
            )
    return sorted(found - {""})


def test_imports_are_read_as_the_compiler_reads_them() -> None:
    """Of every file: an import that the pattern missed would leave the version as it is when that file changes."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    rooms = {name: text for name, text in texts.items() if name.startswith(("cpu/", "cuda/", "common/"))}
    assert len(rooms) > 100
    assert {name: _imports(python_code(text), texts) for name, text in rooms.items()} == {
        name: imported(text, texts) for name, text in rooms.items()
    }


def test_imports_for_types_alone_do_not_count_and_those_within_functions_do() -> None:
    text = """
        from autoconv.a import (
            one as first,  # why
            two,
        )
        import autoconv.b as b, numpy
        if TYPE_CHECKING:
            from autoconv.c import (
                three,
            )
        else:
            from autoconv.d import four
        def f():
            from autoconv.e.g import five; return five
        text = "import autoconv.h"
    """
    names = [f"{name}.py" for name in ("a", "a/two", "b", "c", "d", "e/g", "h")]
    code = python_code(textwrap.dedent(text))
    assert _imports(code, names) == ["a.py", "a/two.py", "b.py", "d.py", "e/g.py"]


# --- the versions of the families -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package."""
    copy = tmp_path_factory.mktemp("copy") / "autoconv"
    shutil.copytree(ROOT / "autoconv", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def versions(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Versions]]:
    """A function that gives the version of every family of the copy, as it is by then; files are read when changed."""
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(copied.parent / "kernels"))
    monkeypatch.setattr(code_hash, "PACKAGE", copied)
    monkeypatch.setattr(code_hash, "_read", _read_once)

    def current() -> Versions:
        code_hash.version.cache_clear()
        code_hash._files.cache_clear()
        names = [f"autoconv.{kind}.{family}" for kind in KINDS for family in import_module(f"autoconv.{kind}").FAMILIES]
        return {name.removeprefix("autoconv."): code_hash.version(_module_of(name)) for name in names}

    yield current
    code_hash.version.cache_clear()
    code_hash._files.cache_clear()


_genuine, _found = code_hash._read, dict[tuple[str, bytes], tuple[str, list[str]]]()


def _read_once(name: str, names: set[str]) -> tuple[str, list[str]]:
    key = name, (code_hash.PACKAGE / name).read_bytes()
    if key not in _found:
        _found[key] = _genuine(name, names)
    return _found[key]


def _module_of(family: str) -> str:
    """The module of a family's first algorithm, as `Algorithm.version` asks with it."""
    return type(import_module(family).ALGORITHMS[0]).__module__


def families_that_change(
    versions: Callable[[], Versions], copied: Path, name: str, edit: Callable[[str], str]
) -> set[str]:
    """The families that have another version after an edit of one file, which is then taken back."""
    before, path = versions(), copied / name
    text = path.read_text(encoding="utf-8")
    assert edit(text) != text
    path.write_text(edit(text), encoding="utf-8")
    try:
        after = versions()
    finally:
        path.write_text(text, encoding="utf-8")
    assert versions() == before
    return {family for family in before if after[family] != before[family]}


def code(text: str) -> str:
    return f"{text}\nNEWS = 1\n"


def comment(text: str) -> str:
    return text.replace('"""', '"""Edited: ', 1).replace("\n", "\n\n", 3) + "\n# the end\n"


@pytest.mark.parametrize(
    "name",
    ["cpu/direct/kernels.py", "cpu/common/algorithm.py", "cuda/gemm/gemm.py", "layer.py", "common/winograd_math.py"],
)
def test_comments_docstrings_and_blank_lines_change_nothing(
    versions: Callable[[], Versions], copied: Path, name: str
) -> None:
    assert families_that_change(versions, copied, name, comment) == set()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("cpu/direct/kernels.py", "cpu.direct"),
        ("cpu/winograd/algorithm.py", "cpu.winograd"),
        ("cpu/fft/kernels.py", "cpu.fft"),
        ("cpu/numpy/gemm.py", "cpu.numpy"),
        ("cuda/fft/fft.cu", "cuda.fft"),
        ("cuda/winograd/winograd.py", "cuda.winograd"),
    ],
)
def test_code_of_a_family_changes_it_alone(
    versions: Callable[[], Versions], copied: Path, name: str, family: str
) -> None:
    def edit(text: str) -> str:
        return f"{text}\n#define NEWS 1\n" if name.endswith(".cu") else code(text)

    assert families_that_change(versions, copied, name, edit) == {family}
    if name.endswith(".cu"):
        assert families_that_change(versions, copied, name, lambda text: f"// news\n{text}\n") == set()


def test_code_of_a_shared_module_changes_those_that_import_it(versions: Callable[[], Versions], copied: Path) -> None:
    everything = set(versions())
    compiled = {family for family in everything if family.startswith("cpu.")} - {"cpu.numpy"}
    assert families_that_change(versions, copied, "cpu/codegen/ir.py", code) == compiled
    assert families_that_change(versions, copied, "layer.py", code) == everything
    transforms = families_that_change(versions, copied, "cpu/transform/geometry.py", code)
    assert {"cpu.winograd", "cpu.fft"} <= transforms < compiled
    twice = families_that_change(versions, copied, "cpu/common/polyphase/kernels.py", code)
    assert {"cpu.direct", "cpu.winograd", "cpu.matrix", "cpu.depthwise"} <= twice < compiled


@pytest.mark.parametrize(
    "name",
    [*VENDORS, "cpu/device.py", "cpu/pool.py", "algorithm.py", "tuning/timing/race.py", "registry.py"],
)
def test_code_that_serves_all_alike_changes_none(versions: Callable[[], Versions], copied: Path, name: str) -> None:
    assert families_that_change(versions, copied, name, code) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_strides_count_for_what_lies_between_layers(versions: Callable[[], Versions], copied: Path, kind: str) -> None:
    """Whose times are kept under the version of its kernels."""

    def of_operators() -> Versions:
        return versions() | {"operators": code_hash.version(f"autoconv.{kind}.operators.elementwise")}

    assert families_that_change(of_operators, copied, "common/arrays.py", code) == {"operators"}


def test_an_algorithm_of_another_place_has_no_version_unless_it_defines_one() -> None:
    """None of our files says when it has changed: with a hash of one, facts of what it was would count for good."""
    for place in ("algorithms", "__main__", "elsewhere.algorithms", "autoconv.elsewhere", "autoconv.cpu.elsewhere"):
        with pytest.raises(NotImplementedError, match=f"^{place}: expected a module of autoconv"):
            code_hash.version(place)


VERSIONS = """if True:
    import json
    from importlib import import_module
    import autoconv.cpu, autoconv.cuda
    names = [f"autoconv.{p}.{f}" for p in ("cpu", "cuda") for f in import_module(f"autoconv.{p}").FAMILIES]
    first = {name.removeprefix("autoconv."): import_module(name).ALGORITHMS[0] for name in names}
    found = {name: algorithm.version for name, algorithm in first.items() if algorithm.vendor is None}
    print(json.dumps({"where": autoconv.cpu.__file__, "versions": found}))
"""


def test_a_copy_elsewhere_has_the_same_versions(copied: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(copied.parent), "AUTOCONV_KERNEL_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", VERSIONS]
    done = subprocess.run(command, env=environment, cwd=copied, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert Path(found["where"]).is_relative_to(copied)
    assert len(found["versions"]) > 10
    here = {name: import_module(f"autoconv.{name}").ALGORITHMS[0].version for name in found["versions"]}
    assert found["versions"] == here
