"""The CPU as a device: its identity, and the memory it hands out."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from autoconv.cpu import allocator, permission
from autoconv.cpu import device as module
from autoconv.cpu.allocator import ALIGNMENT
from autoconv.cpu.codegen import compiler
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


def test_the_name_counts_threads_as_people_do() -> None:
    assert CPU(1, "generic").name.endswith(", 1 thread, generic")
    assert CPU(2, "generic").name.endswith(", 2 threads, generic")


def test_a_pickle_knows_nothing_of_the_machine_that_made_it() -> None:
    device = CPU(2, "generic", matrix_unit="emulated")
    assert device.key
    assert device.versions
    opened = pickle.loads(pickle.dumps(device))
    assert opened == device
    assert not {"key", "versions"} & vars(opened).keys(), "they are found where it is opened"


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
        with pytest.raises(
            PlanError, match=r"instruction_set='sse9': expected (amx or )?avx512 or avx2 or (neon or )?generic"
        ):
            made(instruction_set="sse9")
    monkeypatch.setattr(module, "host_level", lambda: "avx2")
    with pytest.raises(PlanError, match="instruction_set='avx512': expected at most what this processor has, 'avx2'"):
        CPU.current(instruction_set="avx512")
    monkeypatch.setenv("AUTOCONV_ISA", "avx512")
    with pytest.raises(PlanError, match="AUTOCONV_ISA='avx512': expected at most what this processor has, 'avx2'"):
        CPU.current()


AMX = dict.fromkeys(("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"), True)


@pytest.mark.parametrize("lacking", ["", "amx-bf16", "avx512bf16", "permission", "avx512"])
def test_tiles_are_there_only_with_all_that_belongs_to_them(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = "avx2" if lacking == "avx512" else "avx512"
    monkeypatch.setattr(module, "host_instruction_set", lambda: vectors)
    monkeypatch.setattr(compiler, "host_features", lambda: AMX | {lacking: False})
    monkeypatch.setattr(permission, "granted", lambda: lacking != "permission")
    assert module.host_level.__wrapped__() == (vectors if lacking else "amx")


def test_a_processor_with_tiles_can_be_held_to_its_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_level", lambda: "amx")
    monkeypatch.delenv("AUTOCONV_ISA", raising=False)
    whole, vectors = CPU.current(1), CPU.current(1, "avx512")
    assert (whole.instruction_set, whole.matrix_unit, whole.level) == ("avx512", "amx", "amx")
    assert (vectors.instruction_set, vectors.matrix_unit, vectors.level) == ("avx512", None, "avx512")
    assert whole.key == vectors.key.replace("-avx512", "-amx", 1)
    assert whole.lesser_keys == (vectors.key, *vectors.lesser_keys)
    monkeypatch.setenv("AUTOCONV_ISA", "avx512")
    assert CPU.current(1) == vectors


def test_the_key_has_every_feature_that_a_kernel_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two virtual machines of one model, one may lack some."""

    def levels(device: CPU, **features: bool) -> list[str]:
        monkeypatch.setattr(compiler, "host_features", lambda: features)
        fresh = replace(device)  # keys are kept
        return [key.split("-")[5] for key in (fresh.key, *fresh.lesser_keys)]

    vectors = CPU(2, "avx512")
    tiles, narrow = replace(vectors, matrix_unit="amx"), CPU(2, "avx2")
    all_of_them = {"avx512bf16": True, "avx512fp16": True, "avx512vnni": True, "avxvnni": True}
    assert levels(vectors, **all_of_them) == ["avx512+bf16+fp16+vnni", "avx512"]
    assert levels(vectors, avx512vnni=True, avx512bf16=False) == ["avx512+vnni", "avx512"]
    assert levels(vectors) == ["avx512"]
    assert levels(tiles, **all_of_them) == ["amx+bf16+fp16+vnni", "avx512+bf16+fp16+vnni", "avx512"]
    assert levels(tiles) == ["amx", "avx512"]
    assert levels(narrow, **all_of_them) == ["avx2+vnni", "avx2"]
    assert levels(CPU(2, "generic"), **all_of_them) == ["generic"]


def test_another_matrix_unit_is_refused() -> None:
    with pytest.raises(PlanError, match="matrix_unit='sme': expected amx or emulated, or None"):
        CPU(threads=1, instruction_set="avx2", matrix_unit="sme")
    for other in ("avx2", "generic"):
        with pytest.raises(PlanError, match=f"matrix_unit='amx': expected instruction_set='avx512', got '{other}'"):
            CPU(threads=1, instruction_set=other, matrix_unit="amx")


@pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")
@pytest.mark.parametrize(("answer", "granted"), [(0, True), (-1, False)])
def test_permission_is_asked_of_the_system(answer: int, granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    syscall = Mock(return_value=answer)
    monkeypatch.setattr(permission.ctypes, "CDLL", lambda _: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(permission.platform, "machine", lambda: "x86_64")
    assert permission.granted.__wrapped__() is granted
    assert [argument.value for argument in syscall.call_args.args] == [158, 0x1023, 18]


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
    kept = allocator.Allocator()
    small, large = kept.take(allocator.LARGE_PAGE // 2 - 1), kept.take(allocator.LARGE_PAGE // 2)
    address = large.ctypes.data
    assert (large.size, address % allocator.LARGE_PAGE) == (allocator.LARGE_PAGE // 2, 0)
    del small, large
    assert sorted(kept._free) == [allocator.LARGE_PAGE // 2, allocator.LARGE_PAGE]
    whole = kept.take(allocator.LARGE_PAGE)
    assert whole.ctypes.data == address
    whole[...] = 1


def test_kept_memory_is_bounded() -> None:
    kept = allocator.Allocator()
    kept._most = 3 * allocator.PAGE
    arrays = [kept.take(allocator.PAGE) for _ in range(5)]
    arrays.append(kept.take(4 * allocator.PAGE))
    del arrays
    assert kept.kept == 3 * allocator.PAGE
    assert list(map(len, kept._free.values())) == [3]
    large = kept.take(2 * allocator.PAGE)
    del large
    assert kept.kept == 3 * allocator.PAGE
    assert {size: len(arrays) for size, arrays in kept._free.items()} == {allocator.PAGE: 1, 2 * allocator.PAGE: 1}
    assert np.shares_memory(kept.take(1), kept.take(1)) is False


def test_an_array_may_die_while_kept_memory_is_counted() -> None:
    """Until Python 3.12 any new object may start the garbage collector, which may find an array's last reference."""
    kept, threshold = allocator.Allocator(), gc.get_threshold()
    arrays = [kept.take(size * allocator.PAGE) for size in range(1, 33)]
    nbytes = sum(array.size for array in arrays)
    del arrays
    gc.freeze()  # so that a collection looks at little
    try:
        for allocations in range(1, 33):  # after which the collector starts, wherever that is
            gc.disable()
            cycle: list[Any] = [kept.take(allocations * allocator.PAGE)]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            assert nbytes - allocations * allocator.PAGE <= kept.kept <= nbytes
            gc.collect()  # which also forgets the tuples that Python keeps for later, so that each is allocated again
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
        gc.unfreeze()
    assert kept.kept == nbytes


LAST = """
import threading, numpy, autoconv
x, w = numpy.ones((1, 8, 9, 9), "f"), numpy.ones((8, 8, 3, 3), "f")
y, plan = autoconv.conv2d(x, w), autoconv.plan(autoconv.ConvLayer(N=1, C=8, H=9, W=9, K=8, R=3, S=3), mode="heuristic")
threading.kept = lambda: None  # holds the names of this program, until modules that it imports are cleared
"""


def test_a_process_ends_in_silence_whatever_lives_longest(tmp_path: Path) -> None:
    environment = {**os.environ, "AUTOCONV_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LAST], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_what_empties_the_caches_is_filled_aside_and_once() -> None:
    filled = allocator.filled(1 << 20)
    assert filled() is filled()
    assert allocator.filled(1 << 20)() is filled()
    assert filled().nbytes == 1 << 20
    assert filled().min() == filled().max() == 1  # pages that were never written to would all be one page


def test_without_another_thread_memory_is_filled_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert allocator.filled.__wrapped__(1 << 16)().min() == 1


def test_small_arrays_share_slabs_and_nothing_else() -> None:
    memory = allocator.Allocator()
    sizes = [100, 5000, 4096, 700_000, 900_000, 64] * 12
    arrays = [memory.take(size) for size in sizes]
    starts = [array.__array_interface__["data"][0] for array in arrays]
    for n, array in enumerate(arrays):
        array[:] = n
    assert all(
        (array == n).all() and array.size == size for n, (array, size) in enumerate(zip(arrays, sizes, strict=True))
    )
    assert all(start % allocator.ALIGNMENT == 0 for start in starts)
    assert len({start % allocator.PAGE for start in starts}) > 8  # or all would begin in one set of a cache
    del array, arrays
    again = [memory.take(size).__array_interface__["data"][0] for size in sizes[:6]]
    assert set(again) <= set(starts)
