"""The command in tests: a small network, runs in this process and in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autoconv
from autoconv.cli import main

NET = """
name: Tiny
batch: 1
defaults: {bias: true, activation: relu}
layers:
  - {name: first, C: 3, H: 12, K: 4, R: 3, padding: 1}
  - {name: second, C: 4, H: 6, K: 8, R: 1, repeat: 2}
"""


def run(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoconv", *args],
        capture_output=True,
        text=True,
        env=environment() | (env or {}),
        **options,
    )


def environment() -> dict[str, str]:
    root = str(Path(autoconv.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def tuned(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["tune", "tiny.yaml", "--no-isolate", "--json", *args]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
