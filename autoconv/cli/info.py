"""The verb `autoconv info`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from autoconv import __version__, networks, registry
from autoconv.bench.baselines import BASELINES
from autoconv.bench.baselines.base import Library
from autoconv.cli.options import OK, as_json, device_named, on_device
from autoconv.cli.output import print_json
from autoconv.common import machine_code
from autoconv.common.text import count, duration, size
from autoconv.cpu.device import CPU
from autoconv.cpu.extensions import not_enabled
from autoconv.cpu.machine.model import BUSY, Machine
from autoconv.cpu.threads import count_threads
from autoconv.records.cache import TuningCache

if TYPE_CHECKING:
    from autoconv.device import Device

ENVIRONMENT = (
    "AUTOCONV_CACHE_DIR",
    "AUTOCONV_KERNEL_DIR",
    "AUTOCONV_COLLECT",
    "AUTOCONV_NUM_THREADS",
    "AUTOCONV_ISA",
    "AUTOCONV_SPLIT_PRODUCTS",
)
OPTIONAL = {
    "onnx": "networks from ONNX files; pip install 'autoconv[onnx]'",
    "torch": "PyTorch's models; pip install 'autoconv[torch]'",
    "matplotlib": "draws charts; pip install 'autoconv[report]'",
}
FLOATS = ("float32", "float64")  # whose peaks are those of the device
BEYOND = 2  # times the last cache that a working set has to be for its rate to be that of memory
TO_COMPARE = "a library to compare with; pip install 'autoconv[bench]'"


@click.command(short_help="The device, the software, the cache, and what is missing.")
@on_device
@as_json
def info(device_name: str, as_json: bool) -> int:
    """Describe the device, the software, the cache, and what is missing and how to get it."""
    device, cache = device_named(device_name), TuningCache()
    with cache.timing_lock(device.key):
        device.survey()
    found = information(device, cache)
    if as_json:
        print_json(found)
    else:
        print_information(found)
    return OK


def information(device: Device, cache: TuningCache) -> dict[str, Any]:
    """What `info` says, in plain JSON types."""
    from autoconv.bench.networks.runtimes import RUNTIMES
    from autoconv.cuda.hardware import why_unavailable

    records = [record.device for record in cache.records()]
    libraries: tuple[Library, ...] = (*BASELINES.values(), *RUNTIMES.values())
    wanted = dict.fromkeys((name for one in libraries for name in one.packages), TO_COMPARE) | OPTIONAL
    missing = {name: how for name, how in wanted.items() if importlib.util.find_spec(name) is None}
    measured = device.machine.to_json() if isinstance(device, CPU) else None
    if gpu := why_unavailable():
        missing["GPU"] = gpu
    return {
        "autoconv": __version__,
        "python": platform.python_version(),
        "device": {
            "key": device.key,
            "name": device.name,
            **{name: value for name, value in device.facts.items() if name != "name"},
            "peak_gflops": {dtype: device.measured_peak(dtype) / 1e9 for dtype in FLOATS},
        },
        "decisions": _decisions() if device.kind == "cpu" else [],
        "machine": measured,
        "algorithms": [algorithm.name for algorithm in registry.algorithms(device)],
        "versions": device.versions,
        "cache": {
            "directory": str(cache.directory),
            "persistent": cache.persistent,
            "records": len(records),
            "of_this_device": records.count(device.key),
            "shipped": str(cache.system),
            "kernels": str(machine_code.folder()),
            "kernels_bytes": machine_code.used(),
        },
        "networks": networks.names(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "missing": missing,
    }


def _decisions() -> list[str]:
    """What of the processor is used, and what of it is there and is not, and why."""
    threads, why = count_threads()
    disabled = [f"{name}: not used; the processor has it, and the system does not enable it" for name in not_enabled()]
    return [f"{count(threads, 'thread')}: {why}", *disabled]


def print_information(found: dict[str, Any]) -> None:
    """The same for people, one line per fact; on a terminal, as many as it takes."""
    device, cache = found["device"], found["cache"]
    peak = ", ".join(f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in device["peak_gflops"].items())
    machine = Machine.from_json(found["machine"]) if found["machine"] else None
    lines = [
        ("autoconv", f"{found['autoconv']} on Python {found['python']}"),
        ("device", device["name"]),
        ("", device["key"]),
        *(("", why) for why in found["decisions"]),
        ("measured", f"peak {peak}"),
        *(("", line) for line in (_machine_lines(machine, device["l3_bytes"]) if machine else ())),
        ("algorithms", ", ".join(found["algorithms"])),
        ("versions", ", ".join(f"{name} {number}" for name, number in found["versions"].items())),
        ("cache", cache["directory"] + ("" if cache["persistent"] else "; cannot be written: nothing will be kept")),
        ("", f"{cache['records']} records, {cache['of_this_device']} of this device; shipped: {cache['shipped']}"),
        ("", f"{size(cache['kernels_bytes'])} of compiled kernels: {cache['kernels']}"),
        ("networks", ", ".join(found["networks"])),
        *(("environment", f"{name}={value}") for name, value in found["environment"].items()),
        *(("missing", f"{name}: {how}") for name, how in found["missing"].items()),
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for label, text in lines:
        wrapped = textwrap.wrap(text, max(width - 13, 20), break_long_words=False, break_on_hyphens=False)
        sys.stdout.writelines(f"{label if not n else '':<12} {line}\n" for n, line in enumerate(wrapped))


def _rate(dtype: str, rate: float) -> str:
    return f"{rate / 1e9:.0f} {'GOP' if dtype == 'int8' else 'GFLOP'}/s in {dtype}"


def _machine_lines(machine: Machine, last_cache: int) -> list[str]:
    """What was measured besides the peak, when, and whether somebody else was at work meanwhile.

    The last cache, of so many bytes, may hold what was read as if from memory.
    """
    rates = ", ".join(f"{machine.read.rate(nbytes) / 1e9:.0f} from {size(nbytes)}" for nbytes in _sets(machine))
    others = {unit: {t: rate for t, rate in peaks.items() if t not in FLOATS} for unit, peaks in machine.peaks.items()}
    lines = [
        *(f"peak of {unit}: {', '.join(map(_rate, peaks, peaks.values()))}" for unit, peaks in others.items() if peaks),
        "caches in effect for one thread: " + ", ".join(size(nbytes) for nbytes in machine.caches),
        f"{count(machine.threads, 'thread')} read, in GB/s: {rates}, {machine.memory / 1e9:.0f} from memory",
    ]
    if machine.read.last < BEYOND * last_cache:
        lines.append(
            f"the largest working set was of {size(machine.read.last)}, much of which the last cache, of "
            f"{size(last_cache)}, may hold: memory may be slower than that"
        )
    if machine.handed is not None and machine.threads > 1:
        through = _sets(machine)[1]
        there = 1 / (machine.writing(1.0, through / machine.threads) + machine.reading(1.0, through / machine.threads))
        handed = machine.handed.rate(through)
        lines.append(
            f"{count(machine.threads, 'thread')} write {size(through)} and read them again at {there / 1e9:.0f} GB/s, "
            f"and at {handed / 1e9:.0f} where another has written them"
        )
    if machine.call is not None and machine.barrier is not None and machine.wake is not None:
        lines.append(
            f"a call takes {duration(machine.call)}, all threads together {duration(machine.barrier)} more, "
            f"{duration(machine.wake)} when they slept"
        )
    if machine.chase is not None and machine.ahead is not None:
        through = machine.chase.last
        lines.append(
            f"a load from {size(through)} takes {duration(1 / machine.chase.rate(through))}; of those that wait for no "
            f"other, {machine.ahead:.0f} at a time"
        )
    how = "" if machine.thorough else "roughly, "
    quiet = f"while others used {machine.busy:.0%} of the processor: `autoconv info` measures again"
    return [*lines, f"{how}on {machine.when}" + (f", {quiet}" if machine.busy > BUSY else "")]


def _sets(machine: Machine) -> list[int]:
    """Working sets of all threads that fill half of each level."""
    return [machine.threads * nbytes // 2 for nbytes in machine.caches[:2]] + [machine.caches[2] // 2]
