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
from simt.cases import OURS
from simt.emulator import MISSING
from simt.mutants import Site, files, sites

from autoconv.cuda.common.algorithm import CudaAlgorithm

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")

HERE = Path(__file__).parents[1]
EQUIVALENT: dict[str, dict[str, str]] = json.loads((HERE / "mutants.json").read_text())
KERNELS = [a for a in OURS if isinstance(a, CudaAlgorithm) and a.files]
TEXTS = list({algorithm.files: algorithm for algorithm in reversed(KERNELS)}.values())[::-1]  # the first of each


def fates(algorithm: CudaAlgorithm, *arguments: str) -> dict[Site, str]:
    """What became of the mutants of a text, found in a process of one thread, which forks for each of them."""
    command = [sys.executable, "-m", "simt.mutants", algorithm.name, *arguments]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Site(*site): fate for *site, fate in json.loads(done.stdout)}


def test_what_can_be_left_out() -> None:
    """The kinds of place, in files that have all of them together."""
    found = [
        (site.code, site.forced)
        for file in ("common/operands.cuh", "common/implicit.cuh", "gemm/tensor.cu")
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
    algorithm = next(a for a in KERNELS if a.name == "depthwise.wgrad")
    found = fates(algorithm, "400")
    assert any(site.forced is None for site in found)
    for site, fate in found.items():
        assert fate or site.forced is not None, f"{site.name} survives"


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", TEXTS, ids=lambda a: a.name)
def test_every_mutant_is_caught_or_equivalent(algorithm: CudaAlgorithm) -> None:
    """A file that several texts have is judged by the first of them: the others may not need all that it has."""
    found = fates(algorithm)
    first = [file for file in files(*algorithm.files) if file not in _files_before(algorithm)]
    for site, fate in found.items():
        if site.file in first:
            listed = site.name in EQUIVALENT.get(site.file, {})
            assert bool(fate) != listed, f"{site.file}: {site.name}: {fate or 'survives'}, {listed=}"
    unreached = [site.name for file in first for site in sites(file) if site not in found]
    assert not unreached, f"no case comes by {unreached}"


def _files_before(algorithm: CudaAlgorithm) -> set[str]:
    return {file for a in TEXTS[: TEXTS.index(algorithm)] for file in files(*a.files)}
