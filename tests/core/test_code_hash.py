"""Versions of code: what changes them, and what does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoconv import registry
from autoconv.common import code_hash, machine_code
from autoconv.cpu.device import CPU

FAMILIES = {
    a.name: type(a).__module__ for a in registry.algorithms(CPU(threads=1, instruction_set="generic")) if not a.vendor
}
MORE = "x = 1  # code\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Callable[[], dict[str, str]]]]:
    """A copy of the package's text; and what tells the versions of all CPU families in it, read anew."""
    copy = tmp_path / "autoconv"
    shutil.copytree(code_hash.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_hash, "PACKAGE", copy)
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path / "kernels"))

    def forget() -> None:
        code_hash._files.cache_clear()
        code_hash.version.cache_clear()

    def versions() -> dict[str, str]:
        forget()
        return {name: code_hash.version(module) for name, module in FAMILIES.items()}

    yield copy, versions
    forget()


@pytest.mark.parametrize(
    ("file", "more", "changed"),
    [
        ("cpu/gemm/kernels.py", MORE, {"gemm"}),
        ("cpu/gemm/kernels.py", "# a remark\n    # and another\n", set()),
        ("cpu/common/polyphase/geometry.py", MORE, {"direct.polyphase", "winograd.polyphase", "depthwise.polyphase"}),
        ("cpu/codegen/memory.py", MORE, {name for name in FAMILIES if not name.startswith("numpy.")}),
        ("layer.py", MORE, set(FAMILIES)),
        ("tuning/planner.py", MORE, set()),
        ("cpu/pool.py", MORE, set()),
    ],
)
def test_a_version_changes_with_the_code_it_is_made_of(
    package: tuple[Path, Callable[[], dict[str, str]]], file: str, more: str, changed: set[str]
) -> None:
    root, versions = package
    before = versions()
    with (root / file).open("a") as text:
        text.write(more)
    after = versions()
    # the families of one folder are one: those that are computed by another's kernels change with it, too
    folders = {name: FAMILIES[name].rpartition(".")[0] for name in FAMILIES}
    whole = {name for name in FAMILIES if folders[name] in {folders[other] for other in changed}}
    assert {name for name in before if before[name] != after[name]} == whole


def test_texts_are_read_again_only_where_a_file_was_written(
    package: tuple[Path, Callable[[], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, versions = package
    read, read_file = [], code_hash._read
    monkeypatch.setattr(code_hash, "_read", lambda name, names: (read.append(name), read_file(name, names))[1])
    before = versions()
    assert "cpu/gemm/kernels.py" in read
    read.clear()
    assert versions() == before
    assert not read
    with (root / "cpu/gemm/kernels.py").open("a") as text:
        text.write(MORE)
    assert versions() != before
    for kept in machine_code.folder().iterdir():  # damaged, they are read anew
        kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    read.clear()
    assert versions()["gemm"] != before["gemm"]
    assert read
