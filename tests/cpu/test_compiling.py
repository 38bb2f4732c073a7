"""The compiler: kernels kept in memory and on disk, what a first call compiles, and processors LLVM does not know."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from emitted import call, emit_long, emit_tables
from forked import exit_code, forks

from autoconv.common import code_hash, machine_code
from autoconv.cpu import pool
from autoconv.cpu.codegen import compiler
from autoconv.tuning.racing import HURRIED_CANDIDATES

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path / "kernels"))


def test_kernels_are_kept_on_disk_and_damage_is_repaired(monkeypatch):
    emitted = []

    def emit(instruction_set):
        emitted.append(instruction_set)
        return emit_tables(instruction_set, "float64")

    def build():
        with monkeypatch.context() as patch:  # as another process would: nothing in memory
            patch.setattr(compiler, "_programs", {})
            compiler._compiled.cache_clear()
            return compiler.build(emit, "generic")

    out = np.zeros(4)
    code_hash.version(compiler.__name__)  # which is kept there too
    others = set(machine_code.folder().glob("*"))
    build()
    build()
    assert len(emitted) == 1
    files = set(machine_code.folder().iterdir()) - others
    assert len(files) == 2  # the kernel, and its only unit
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        good = file.read_bytes()
        for bad in (b"", good[:40], good[:-1] + b"?", b"\0" * len(good)):
            file.write_bytes(bad)
            call(build(), "read", out)
            assert file.read_bytes() == good
    assert len(emitted) == 9
    other = machine_code.folder() / "ab".rjust(64, "0")
    file.rename(other)  # a kernel under another's name, such as another processor's
    assert machine_code.load(bytes.fromhex(other.name)) is None


def test_what_kernels_have_in_common_is_compiled_once():
    def build(number):
        compiler._compiled.cache_clear()
        before = set(machine_code.folder().glob("*"))
        program, out = compiler.build(emit_long, "generic", number), np.zeros(101)
        for name in program.names:
            call(program, name, out)
            np.testing.assert_array_equal(out, [*range(100), number])
            out[:] = 0
        return len(set(machine_code.folder().iterdir()) - before)

    code_hash.version(compiler.__name__)
    assert build(1) == 5  # the kernel, three exported functions, and one for what both long ones are
    assert build(2) == 3  # one that calls the others is the same


FAR = """
import mmap
import numpy as np
from emitted import call, emit_long, emit_tables
from autoconv.cpu.codegen import compiler

def reserve(size):
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, 0)  # no access, no memory
    return np.frombuffer(memory, np.uint8).ctypes.data, memory

compiler.build(emit_tables, "generic", "float64")  # LLVM itself finds a place
large = [reserve(3 << 30) for _ in range(2)]
small = [reserve(mmap.PAGESIZE)]
while small[-1][0] > large[0][0]:  # until every gap above is filled
    small.append(reserve(mmap.PAGESIZE))
max(small)[1].close()
got, long = np.empty(4, "float32"), np.empty(101)
call(compiler.build(emit_tables, "generic", "float32"), "read", got)
sorted(small)[-2][1].close()
call(compiler.build(emit_long, "generic", 7), "fill_twice", long)
print(got, long.sum())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="depends on where Linux maps memory")
def test_code_and_constants_stay_together_where_large_arrays_leave_small_gaps():
    """In a process of its own, since a linker that is led astray ends it."""
    here = Path(__file__).parent
    places = [str(here), str(here.parent), str(here.parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", FAR], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [*str(np.array([0.1, 2.0, -3.5, 1e30], np.float32)).split(), "4957.0"], done.stderr


def test_an_unsupported_processor_is_told_once(monkeypatch):
    def refuse():
        raise RuntimeError("no such target")

    def forget():
        for memory in (pool.unavailable, pool.program):
            memory.cache_clear()

    monkeypatch.setattr(compiler, "_llvm", refuse)
    monkeypatch.setattr(compiler, "_programs", {})
    forget()
    try:
        with pytest.warns(RuntimeWarning, match="falls back to NumPy"):
            assert not pool.available()
        assert "no such target" in pool.unavailable()
    finally:
        forget()


FIRST = """if True:
    import collections
    import numpy as np
    import autoconv
    from autoconv.cpu.codegen.ir import Module
    emitters, units = collections.Counter(), Module.units
    def count(module):
        emitters.update({"runs" if "run" in (names := [f.name for f in module.functions]) else names[-1]})
        return units(module)
    Module.units = count
    autoconv.conv2d(np.ones((1, 16, 8, 8), np.float32), np.ones((8, 16, 3, 3), np.float32), padding=1)
    print((dict(emitters), autoconv.CPU.current().matrix_unit))
"""


def test_a_first_call_compiles_few_kernels(tmp_path: Path) -> None:
    """Most of its time goes by while they are compiled: of the pool, of the machine's first look, and of the layer."""
    environment = os.environ | {"AUTOCONV_CACHE_DIR": str(tmp_path), "AUTOCONV_KERNEL_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True)
    emitters, unit = ast.literal_eval(done.stdout)
    kernels = emitters.pop("runs")  # which pool.wake is one of, and the reference in float64
    of_tiles = {"tiles": 2} if unit else {}  # of each type
    assert emitters == {"stop": 1, "nothing": 1, "peak": 2, "words": 1} | of_tiles
    assert kernels <= 2 + HURRIED_CANDIDATES + 2  # some of a smaller error


@forks
def test_a_child_compiles_though_another_thread_was_about_to():
    held, release = threading.Event(), threading.Event()

    def compile_for_long():
        with compiler._lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=compile_for_long)
    thread.start()
    held.wait()
    threading.Timer(0.2, release.set).start()

    def take():
        with compiler._lock:
            return 0

    assert exit_code(take) == 0
    thread.join()
