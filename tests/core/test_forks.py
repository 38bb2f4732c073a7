"""Compiling ahead in forked processes."""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from pathlib import Path

import pytest

from autoconv.common import forks
from autoconv.common.forks import compiled_aside


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes can be forked")
def test_processes_aside_compile_from_the_end_and_are_gone_after(tmp_path: Path) -> None:
    def build(number: int) -> None:
        (tmp_path / f"{number}-{os.getpid()}").touch()
        if number == 4:
            raise ValueError("what one process cannot build, the other meets")

    builds = [lambda n=n: build(n) for n in range(6)]
    with compiled_aside(builds, 2):
        while len(list(tmp_path.iterdir())) < 6:
            pass
    (helper,) = {int(path.name.partition("-")[2]) for path in tmp_path.iterdir()}
    with pytest.raises(ProcessLookupError):
        os.kill(helper, 0)
    with compiled_aside(builds[:1], 2):  # who has nothing to share forks nothing
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes can be forked")
def test_where_no_more_processes_can_be_made_the_others_do_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made, fork = list[int](), os.fork

    def fork_once() -> int:
        if made:
            raise BlockingIOError("Resource temporarily unavailable")
        made.append(fork())
        return made[0]

    monkeypatch.setattr(os, "fork", fork_once)
    with compiled_aside([lambda: None] * 4, 3):
        assert len(made) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(made[0], 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes can be forked")
def test_processes_that_the_system_takes_care_of_are_not_waited_for(tmp_path: Path) -> None:
    """As whoever starts us may have it: a signal that is ignored stays so."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with compiled_aside([lambda: None, (tmp_path / "built").touch], 2):
            while not (tmp_path / "built").exists():
                time.sleep(0.01)
            time.sleep(0.1)  # for it to end
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nobody is forked here")
def test_a_death_is_noticed_while_forked_processes_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what the worker writes its answers to, which would not end before they do."""
    read, write = os.pipe()
    monkeypatch.setattr(forks, "LONGEST", 30)
    builds = [lambda: time.sleep(20)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forks.compiled_aside(builds, 2):
            os.close(write)
            assert select.select([read], [], [], 10)[0] == [read]
            assert os.read(read, 1) == b""
    os.close(read)
