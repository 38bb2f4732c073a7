"""The CPU as a device: its identity, and the memory it hands out."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoconv.cpu import allocator as memory
from autoconv.cpu import device as module
from autoconv.cpu.allocator import ALIGNMENT
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError


def test_the_key_tells_what_times_depend_on() -> None:
    one, two = CPU.current(threads=1), CPU.current(threads=2)
    assert one.key != two.key
    assert "threads1" in one.key
    assert CPU.current(threads=1) == one
    generic = CPU.current(instruction_set="generic")
    assert "generic" in generic.key
    assert generic.key.isprintable()
    assert " " not in generic.key


def test_the_version_of_scipy_is_read_without_importing_it() -> None:
    code = "import sys, autoconv.registry as r; print(r.this_device().versions['scipy'], 'scipy' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    try:
        installed = metadata.version("scipy")
    except metadata.PackageNotFoundError:
        installed = "absent"
    assert answer.stdout.split() == [installed, "False"]


@pytest.mark.parametrize("quote", ["'", '"'])  # SciPy has written either
def test_the_version_of_any_scipy_is_read(quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "short_version = '1.13.0'\nversion = '1.13.0.dev1'\nif not release:\n    version = full_version\n"
    (tmp_path / "version.py").write_text(text.replace("'", quote))
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert module._scipy_version() == "1.13.0.dev1"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "99999"])
def test_a_thread_count_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_NUM_THREADS", text)
    with pytest.raises(PlanError, match=r"AUTOCONV_NUM_THREADS=.*expected an integer from 1 to 1024"):
        CPU.current()


def test_a_variable_that_is_set_to_nothing_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CPU.current()
    monkeypatch.setenv("AUTOCONV_NUM_THREADS", "")
    monkeypatch.setenv("AUTOCONV_ISA", "")
    assert CPU.current() == whole


@pytest.mark.parametrize("threads", [0, -1, 1025, "2", 2.5, True])
def test_a_processor_without_a_number_of_threads_is_refused(threads: Any) -> None:
    for made in (CPU.current, lambda threads: CPU(threads=threads, instruction_set="generic")):
        with pytest.raises(PlanError, match=f"threads={threads!r}: expected an integer from 1 to 1024"):
            made(threads)


def test_an_instruction_set_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (CPU.current, lambda instruction_set: CPU(threads=1, instruction_set=instruction_set)):
        with pytest.raises(PlanError, match="instruction_set='sse9': expected avx512 or avx2 or generic"):
            made(instruction_set="sse9")
    monkeypatch.setattr(module, "host_instruction_set", lambda: "avx2")
    with pytest.raises(PlanError, match="instruction_set='avx512': expected at most what this processor has, 'avx2'"):
        CPU.current(instruction_set="avx512")
    monkeypatch.setenv("AUTOCONV_ISA", "avx512")
    with pytest.raises(PlanError, match="AUTOCONV_ISA='avx512': expected at most what this processor has, 'avx2'"):
        CPU.current()


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (1000, 1000)])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_arrays_start_on_a_cache_line(shape: tuple[int, ...], dtype: str) -> None:
    array = CPU.current().empty(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % ALIGNMENT == 0 or array.size == 0
    array[...] = 1


def test_memory_is_used_again_but_never_while_a_view_lives() -> None:
    device = CPU.current()
    first = device.empty((77, 1001), "float32")
    address = first.ctypes.data
    view = first[3:, ::2]
    del first
    second = device.empty((77, 1001), "float32")
    assert second.ctypes.data != address
    view[...] = 5.0
    second[...] = 7.0
    assert (view == 5.0).all()
    del view
    assert device.empty((77, 1001), "float32").ctypes.data == address


def test_what_fills_half_a_large_page_is_a_whole_number_of_them() -> None:
    kept = memory.Memory()
    small, large = kept.take(memory.LARGE_PAGE // 2 - 1), kept.take(memory.LARGE_PAGE // 2)
    address = large.ctypes.data
    assert (large.size, address % memory.LARGE_PAGE) == (memory.LARGE_PAGE // 2, 0)
    del small, large
    assert sorted(kept._free) == [memory.LARGE_PAGE // 2, memory.LARGE_PAGE]
    whole = kept.take(memory.LARGE_PAGE)
    assert whole.ctypes.data == address
    whole[...] = 1


def test_kept_memory_is_bounded() -> None:
    kept = memory.Memory()
    kept._most = 3 * memory.PAGE
    arrays = [kept.take(memory.PAGE) for _ in range(5)]
    arrays.append(kept.take(4 * memory.PAGE))
    del arrays
    assert kept.kept == 3 * memory.PAGE
    assert list(map(len, kept._free.values())) == [3]
    large = kept.take(2 * memory.PAGE)
    del large
    assert kept.kept == 3 * memory.PAGE
    assert {size: len(arrays) for size, arrays in kept._free.items()} == {memory.PAGE: 1, 2 * memory.PAGE: 1}
    assert np.shares_memory(kept.take(1), kept.take(1)) is False
