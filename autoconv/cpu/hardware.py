"""What the system and LLVM say of the processor, and of its caches."""

from __future__ import annotations

import functools
import itertools
import os
import platform
from pathlib import Path
from typing import NamedTuple

from autoconv.cpu import allocator

CPUINFO = Path("/proc/cpuinfo")
_NO_LLVM = ImportError, OSError, RuntimeError


class Identity(NamedTuple):
    """Which processor it is: its marketing name, and what tells it from all others."""

    name: str
    vendor: str
    family: str
    model: str
    stepping: str


def features() -> dict[str, bool]:
    """What LLVM says that this processor has; nothing where LLVM is not there."""
    try:
        from autoconv.cpu.codegen.compiler import host_features

        return host_features()
    except _NO_LLVM:
        return {}


def identity() -> Identity:
    """The first processor's, from /proc/cpuinfo.

    ARM's registers name no product: there it has the name that LLVM knows it by, as it has where there is no such file.
    """
    info = _cpuinfo()
    if "vendor_id" in info:
        numbers = (info.get(name, "0") for name in ("cpu family", "model", "stepping"))
        return Identity(info.get("model name", "unknown"), info["vendor_id"], *numbers)
    known_as, machine = _llvm_name(), platform.machine()
    if "CPU implementer" in info:
        vendor, family, part = (info.get(f"CPU {name}", "0") for name in ("implementer", "architecture", "part"))
        revision = f"r{int(info.get('CPU variant', '0'), 0)}p{info.get('CPU revision', '0')}"
        return Identity(known_as or f"{machine} {vendor} {part}", vendor, family, part, revision)
    return Identity(known_as or platform.processor() or machine, machine, "0", known_as or "0", "0")


def _llvm_name() -> str:
    """What LLVM calls this processor; empty where it does not know it, or is not there."""
    try:
        from autoconv.cpu.codegen.compiler import host_name

        name = host_name()
    except _NO_LLVM:
        return ""
    return "" if name == "generic" else name


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; nothing where there is no such file."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            first = list(itertools.takewhile(str.strip, file))  # the system would have to ask every other one
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first)
    return {name.strip(): value.strip() for name, _, value in pairs}


@functools.cache
def cache_sizes() -> tuple[int, int, int]:
    """Bytes of the data caches of levels 1 to 3 as one processor sees them; guesses where unknown."""
    sizes = {1: 32 << 10, 2: 1 << 20, 3: 8 << 20}
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        try:
            kind, level, size = (_line(f"{folder}/{name}") for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[int(level)] = int(size[:-1]) << 10
    return sizes[1], sizes[2], sizes[3]


def _line(path: str) -> str:
    """The only line of one of the system's files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, allocator.PAGE).decode().strip()
    finally:
        os.close(descriptor)
