"""One process, and one thread of it, times on a device at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from races import DEVICE

from autoconv.errors import PlanError
from autoconv.records import turns
from autoconv.records.cache import TuningCache

HOLD = """
import sys
from autoconv.records.cache import TuningCache
with TuningCache(sys.argv[1], None).timing_lock(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("usable", [True, False])
def test_two_processes_do_not_time_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: bool) -> None:
    """Not even where the lock has to go to the temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "file").touch()
    cache = TuningCache(tmp_path / "cache" if usable else tmp_path / "file" / "cache", system=None)
    command = [sys.executable, "-c", HOLD, str(cache.directory), DEVICE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(PlanError, match="another process has been timing"), cache.timing_lock(DEVICE, timeout=0.05):
            pass
        with cache.timing_lock("another device", timeout=0.05):
            pass
        holder.stdin.write("\n")
        holder.stdin.close()
        with cache.timing_lock(DEVICE):
            assert holder.wait() == 0


def test_who_waits_for_long_is_told_once_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "SILENT", 0.05)
    cache, held = TuningCache(tmp_path, system=None), threading.Event()

    def hold() -> None:
        with cache.timing_lock(DEVICE):
            held.set()
            while not caplog.messages:
                time.sleep(0.01)
            time.sleep(0.2)

    with cache.timing_lock(DEVICE):
        pass
    assert not caplog.messages
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    with cache.timing_lock(DEVICE):
        holder.join()
    (lock,) = tmp_path.glob("*.lock")
    told = f"waiting for another process, or thread, that is timing on {DEVICE}: it holds {lock}"
    assert caplog.messages == [told]


def test_without_a_temporary_folder_the_lock_is_in_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("autoconv.records.cache.temporary_folder", missing)
    with TuningCache(tmp_path, system=None).timing_lock(DEVICE, timeout=1):
        assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".lock"] == [".lock"]
    (tmp_path / "file").touch()
    unusable = TuningCache(tmp_path / "file" / "cache", system=None)
    with pytest.warns(UserWarning, match="two processes may time"), unusable.timing_lock(DEVICE, timeout=1):
        pass


def test_a_process_that_dies_lets_go_of_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), DEVICE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with TuningCache(tmp_path, system=None).timing_lock(DEVICE, timeout=10):
        pass


def test_threads_take_turns_and_one_may_hold_the_lock_twice(cache: TuningCache) -> None:
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with cache.timing_lock(DEVICE), cache.timing_lock(DEVICE):
                inside += 1
                most = max(most, inside)
                time.sleep(1e-4)  # the others come in now, if they can
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_what_happens_under_the_lock_is_not_swallowed_and_frees_it(cache: TuningCache) -> None:
    with pytest.raises(KeyError), cache.timing_lock(DEVICE):
        raise KeyError
    with cache.timing_lock(DEVICE, timeout=1):
        pass
