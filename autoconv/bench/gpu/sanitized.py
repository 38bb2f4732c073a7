"""A process under NVIDIA's compute-sanitizer: what its kernels read and write beyond their arrays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from autoconv.device import Device
from autoconv.tuning.process import Message, inherited, opening

TOOL = "compute-sanitizer"  # comes with the CUDA toolkit, and as a wheel of its own
FOUND = 86  # its exit status when it has something to complain of
MARK = "========="  # before each of its lines


def memcheck(device: Device, module: str, message: Message) -> Message:
    """Ask a process that the sanitizer watches.

    Parameters
    ----------
    device : Device
        Opened there as well.
    module : str
        What the process runs: its `__main__` is to call `serve`.
    message : dict
        What it is asked.

    Returns
    -------
    dict
        Its answer; or the sanitizer's complaint as a `failure`; or why it was `skipped`.
    """
    homes = [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    tool = shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *homes]))
    if tool is None:
        return {"skipped": f"{TOOL}: expected it in PATH or in CUDA_HOME/bin"}
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-P", "-m", module],
        input="".join(json.dumps(one) + "\n" for one in (opening(device), message)),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=inherited(),
    )
    lines = done.stdout.splitlines()
    if done.returncode == FOUND:
        said = [line.removeprefix(MARK).strip() for line in lines if line.startswith(MARK)]
        complaint = [i for i, line in enumerate(said) if line.startswith(("Invalid", "Program hit"))] or [0]
        return {"failure": f"{TOOL}: {'; '.join(said[complaint[0] : complaint[0] + 4])}"[:500]}
    answers = [line for line in lines if line.startswith("{")]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"failure": f"{TOOL}: exited with status {done.returncode}: {last[:300]}"}
    return dict(json.loads(answers[-1]))
