"""The sanitizer on hardware: it comes first, and what it says is the result."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from bench_gpus import WANTED, Narrow
from simt.emulator import MISSING

from autoconv.bench.gpu.agenda import SANITIZED, items
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.bench.gpu.helper import Work
from autoconv.bench.gpu.report import markdown
from autoconv.bench.gpu.sanitized import FOUND, MARK, TOOL
from autoconv.registry import algorithms

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


def test_a_sanitizer_comes_first() -> None:
    first = list(itertools.islice(items(("check",), algorithms(NOMINAL), WANTED), len(SANITIZED) + 1))
    assert [item.split("/")[:2] for item in first] == [*(["sanitize", name] for name in SANITIZED), ["warm"]]


@pytest.mark.parametrize("complaint", ["", "Invalid __global__ read of size 4 bytes"])
def test_what_a_sanitizer_says_is_the_result(complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that runs what it is given, and complains or does not."""
    tool = tmp_path / "bin" / TOOL
    tool.parent.mkdir()
    ending = f"echo '========= {complaint}'; echo '=========     at gemm'; exit {FOUND}" if complaint else ""
    tool.write_text(f"#!/bin/sh\necho '{MARK} {TOOL}'\nshift 4\n\"$@\"\n{ending}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    work = Work(Narrow(capability=80), tmp_path)
    found = work.do(f"sanitize/direct/{work.algorithms['direct'].version}")
    if complaint:
        assert found == {"failure": f"{TOOL}: {complaint}; at gemm"}
    else:
        assert found["error"] <= found["bound"]
    machine = {"item": "machine", "name": "a GPU", "versions": {}, "autoconv": "0", "commit": "0", "baselines": {}}
    text = markdown([machine | {"vendors": {}, "missing": {}}, {"item": "sanitize/direct/1"} | found], [], 0)
    assert f"- compute-sanitizer on direct: {found.get('failure', 'nothing to complain of')}\n" in text


def test_without_a_sanitizer_the_item_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    work = Work(Narrow(capability=80), tmp_path)
    assert "expected it in PATH" in work.do(f"sanitize/direct/{work.algorithms['direct'].version}")["skipped"]
