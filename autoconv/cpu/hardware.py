"""What the system says of the processor, and of its caches."""

from __future__ import annotations

import functools
import itertools
import os
import platform
from pathlib import Path

from autoconv.cpu import allocator


@functools.cache
def cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo, or what Python knows elsewhere."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            first = list(itertools.takewhile(str.strip, file))  # the system would have to ask every other one
    except OSError:
        return {"vendor_id": platform.machine(), "model name": platform.processor() or platform.machine()}
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
