"""How many threads compute: affinity, hyper-threads, quotas; and extensions that the system does not enable."""

import os

import numpy as np
import pytest

from autoconv import PlanError
from autoconv.cli import info
from autoconv.cpu import allocator, cgroup, extensions, pool, threads
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import X86
from autoconv.cpu.device import CPU
from autoconv.cpu.threads import count_threads

MAX = "max 100000"


class Computer:
    """A computer's files under a folder: processors, and control groups mounted at `cgroup`."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.mounts, self.groups = [], []
        (folder / "proc").mkdir()
        monkeypatch.delenv("AUTOCONV_NUM_THREADS", raising=False)
        monkeypatch.setattr(cgroup, "PROCESS", folder / "proc")
        monkeypatch.setattr(threads, "PROCESSORS", folder / "cpu")
        self.of(4)

    def of(self, processors, allowed=None, hyper_threads=1):
        """So many processors, of which some are allowed; `hyper_threads` neighbours are of one core."""
        self.monkeypatch.setattr(os, "cpu_count", lambda: processors)
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed or range(processors)), raising=False)
        for n in range(processors):
            first = n // hyper_threads * hyper_threads
            siblings = ",".join(map(str, range(first, first + hyper_threads)))
            self.write(f"cpu/cpu{n}/topology/thread_siblings_list", siblings)

    def write(self, name, text):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def mount(self, line, kind, options, root="/", group="/"):
        """A hierarchy of control groups, mounted at a folder of its own, and this process's group in it."""
        place = self.folder / f"mount{len(self.mounts)}"
        place.mkdir()
        self.mounts.append(f"31 23 0:28 {root} {place} rw,relatime shared:9 - {kind} cgroup {options}")
        self.groups.append(f"{line}:{group}")
        self.write("proc/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "\n".join(self.mounts))
        self.write("proc/cgroup", "\n".join(self.groups))
        return place.name

    def version2(self, **where):
        return self.mount("0:", "cgroup2", "rw", **where)

    def version1(self, **where):
        return self.mount("3:cpu,cpuacct", "cgroup", "rw,cpu,cpuacct", **where)


@pytest.fixture
def computer(tmp_path, monkeypatch):
    return Computer(tmp_path, monkeypatch)


def test_one_for_each_core(computer):
    assert count_threads() == (4, "one for each of 4 cores")
    computer.of(1)
    assert count_threads() == (1, "one core")


def test_processors_that_are_not_allowed_do_not_count(computer):
    computer.of(8, {1, 5})
    assert count_threads() == (2, "one for each of 2 cores; this process may use 2 of 8 processors")


def test_hyper_threads_of_a_core_share_a_thread(computer):
    computer.of(8, hyper_threads=2)
    assert count_threads() == (4, "one for each of 4 cores, whose 8 hyper-threads share what multiplies")
    computer.of(8, {0, 1, 2}, hyper_threads=2)
    assert count_threads().threads == 2
    computer.of(2, hyper_threads=2)
    assert count_threads() == (1, "one core, whose 2 hyper-threads share what multiplies")


def test_where_the_system_says_nothing_every_processor_counts(computer, monkeypatch):
    monkeypatch.setattr(threads, "PROCESSORS", computer.folder / "nothing")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert count_threads().threads == 4


def test_processors_at_once_are_those_allowed_or_what_a_quota_leaves(computer):
    assert threads.processors() == 4
    where = computer.version2(group="/job")
    for quota, number in (("50000 100000", 0.5), ("250000 100000", 2.5), ("900000 100000", 4), (MAX, 4)):
        computer.write(f"{where}/job/cpu.max", quota)
        assert threads.processors() == number


@pytest.mark.parametrize(
    ("quota", "count"), [("250000 100000", 2), ("400000 100000", 4), ("50000 100000", 1), (MAX, 4), ("", 4), ("1 0", 4)]
)
def test_a_quota_of_version_2(computer, quota, count):
    where = computer.version2(group="/user/job")
    computer.write(f"{where}/user/job/cpu.max", quota)
    found = count_threads()
    assert found.threads == count
    if count < 4:
        share = int(quota.split()[0]) / 1e5
        assert found.reason == f"a quota of {share:g} processors' time (one for each of 4 cores without it)"


def test_the_least_quota_of_all_ancestors_counts(computer):
    where = computer.version2(group="/a/b/c")
    for group, quota in {"": MAX, "a": "300000 100000", "a/b": "100000 50000", "a/b/c": MAX}.items():
        computer.write(f"{where}/{group}/cpu.max", quota)
    assert count_threads().threads == 2


def test_a_group_of_another_name_space_is_what_is_mounted(computer):
    where = computer.version2(group="/../elsewhere")
    computer.write(f"{where}/cpu.max", "200000 100000")
    assert count_threads().threads == 2


@pytest.mark.parametrize(("quota", "count"), [("150000", 1), ("300000", 3), ("-1", 4)])
def test_a_quota_of_version_1(computer, quota, count):
    computer.mount("0:", "cgroup2", "rw")  # beside it, and with no say
    where = computer.version1(root="/docker/box", group="/docker/box/inner")
    computer.write(f"{where}/inner/cpu.cfs_quota_us", quota)
    computer.write(f"{where}/inner/cpu.cfs_period_us", "100000")
    assert count_threads().threads == count


@pytest.mark.parametrize("broken", ["", "nonsense", ":::", "31 23 - cgroup2", "- cgroup cgroup cpu"])
def test_files_that_cannot_be_understood_are_no_quota(computer, broken):
    computer.write("proc/cgroup", f"0::/a\n2:cpu:/b\n{broken}")
    computer.write("proc/mountinfo", broken)
    assert count_threads().threads == 4


def test_the_environment_has_the_last_word(computer, monkeypatch):
    monkeypatch.setenv("AUTOCONV_NUM_THREADS", "3")
    assert count_threads() == (3, "AUTOCONV_NUM_THREADS=3")
    assert CPU.current().threads == 3
    for wrong in ("0", "-1", "two", "1.5", "99999"):
        monkeypatch.setenv("AUTOCONV_NUM_THREADS", wrong)
        with pytest.raises(PlanError, match=f"AUTOCONV_NUM_THREADS='{wrong}': expected an integer from 1 to 1024"):
            count_threads()
    monkeypatch.setenv("AUTOCONV_NUM_THREADS", "9" * 5000)  # more digits than Python makes a number of
    with pytest.raises(PlanError, match="expected an integer from 1 to 1024"):
        count_threads()


@pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
@pytest.mark.skipif(not X86, reason="CPUID is x86's")
class TestExtensions:
    def test_what_is_used_is_there_and_enabled(self):
        features, saved, leaf = compiler.host_features(), extensions.saved(), extensions.cpuid(7)
        for name, feature in (("avx2", "avx2"), ("avx512", "avx512f"), ("amx", "amx-tile")):
            bits, at, bit = extensions.EXTENSIONS[name]
            assert features.get(feature, False) == bool(leaf[at] >> bit & 1 and saved & bits == bits)

    def test_cpuid_tells_the_vendor_as_the_system_does(self):
        _, b, c, d = extensions.cpuid(0)
        assert np.array([b, d, c], "<u4").tobytes().decode() == CPU.current().facts["vendor"]
        assert extensions.cpuid(0x7FFF_0000) == [0, 0, 0, 0]

    def test_an_extension_that_the_system_does_not_enable_is_named(self, monkeypatch):
        every = [0xFFFF_FFFF] * 4
        monkeypatch.setattr(extensions, "cpuid", lambda leaf: every)
        for kept, missing in ((0b111, ["avx512", "amx"]), (0, ["avx2", "avx512", "amx"]), (0x600E7, [])):
            monkeypatch.setattr(extensions, "saved", lambda kept=kept: kept)
            assert extensions.not_enabled() == missing
        monkeypatch.setattr(info, "not_enabled", lambda: ["avx512"])
        assert "avx512: not used; the processor has it, and the system does not enable it" in info._decisions()
        monkeypatch.setattr(extensions, "cpuid", lambda leaf: [0] * 4)
        assert extensions.not_enabled() == []


def test_info_says_how_many_threads_and_why(computer):
    where = computer.version2()
    computer.write(f"{where}/cpu.max", "50000 100000")
    assert "1 thread: a quota of 0.5 processors' time (one for each of 4 cores without it)" in info._decisions()


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_the_least_group_has_left(computer, version):
    limit, used, idle = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    everything = CPU.current().memory_available()
    line, kind, options = ("0:", "cgroup2", "rw") if version == 2 else ("3:memory", "cgroup", "rw,memory")
    where = computer.mount(line, kind, options, group="/user/job")
    computer.write(f"{where}/user/job/{limit}", "max" if version == 2 else str((1 << 63) - 4096))
    computer.write(f"{where}/user/job/{used}", str(1 << 20))
    assert cgroup.memory()[0] in (None, (1 << 63) - 4096)
    assert CPU.current().memory_available() > everything // 2
    computer.write(f"{where}/user/{limit}", str(64 << 20))
    computer.write(f"{where}/user/{used}", str(40 << 20))
    assert cgroup.memory() == (64 << 20, 24 << 20)
    computer.write(f"{where}/user/memory.stat", f"anon 5\n{idle} {8 << 20}")
    assert CPU.current().memory_available() == 32 << 20
    assert allocator.physical_memory() == 64 << 20
