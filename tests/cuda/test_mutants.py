"""Every barrier, wait, commit, fence and check of every kernel, left out one at a time, is missed by some test.

`mutants.json` lists those that no run can miss, by file, with the argument why. The tool is `simt/mutants.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simt.emulator import MISSING
from simt.mutants import Site, all_files, sites

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

HERE = Path(__file__).parents[1]
EQUIVALENT: dict[str, dict[str, str]] = json.loads((HERE / "mutants.json").read_text())


def fates(file: str, *arguments: str) -> dict[Site, str]:
    """What became of the mutants of a file, found in a process of one thread, which forks for each of them."""
    command = [sys.executable, "-m", "simt.mutants", file, *arguments]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Site(*site): fate for *site, fate in json.loads(done.stdout)}


def test_what_can_be_left_out() -> None:
    """The kinds of place, in files that have all of them together."""
    found = [
        (site.code, site.forced)
        for file in ("common/operands.cuh", "gemm/gemm.cu", "gemm/tensor.cu")
        for site in sites(file)
    ]
    for expected in (
        ("__syncthreads()", None),
        ("wait_copies<STAGES - 2>()", None),
        ("commit_copies()", None),
        ("within(h, HEIGHT)", True),
        ("depth < DEPTH", True),
        ("at >= TOTAL", False),
        ("slice < last", True),
    ):
        assert expected in found


def test_the_list_is_of_what_there_is() -> None:
    for file, names in EQUIVALENT.items():
        assert set(names) <= {site.name for site in sites(file)}
        assert all(len(argument) > 20 for argument in names.values())


def test_a_sample_of_mutants_is_caught() -> None:
    """A kernel with barriers and checks, on some of its cases."""
    found = fates("depthwise/wgrad.cu", "400")
    assert any(site.forced is None for site in found)
    for site, fate in found.items():
        assert fate or site.forced is not None, f"{site.name} survives"


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", all_files())
def test_every_mutant_is_caught_or_equivalent(file: str) -> None:
    found = fates(file)
    assert not [site.name for site in sites(file) if site not in found], "no case comes by these"
    assert {site.name for site, fate in found.items() if not fate} == set(EQUIVALENT.get(file, {}))
