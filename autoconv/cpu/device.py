"""The CPU as a device: what it is, what runs on it, how launches on it are timed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoconv.algorithm import Algorithm, Array, Params
from autoconv.common import code_hash
from autoconv.common.text import count
from autoconv.cpu import allocator, hardware, permission
from autoconv.cpu.codegen.values import ARM, X86
from autoconv.cpu.machine.model import Machine
from autoconv.cpu.machine.recorded import machine_in_force, survey
from autoconv.cpu.threads import MOST_THREADS, count_threads
from autoconv.device import Device, Operands, Stopwatch, with_its_sign
from autoconv.errors import ArrayError, PlanError

if TYPE_CHECKING:
    from types import ModuleType

    from autoconv.layer import ConvLayer


INSTRUCTION_SETS = ("avx512", "avx2", "neon", "generic")  # of vectors
NETWORK_BYTES = 64 << 20  # read by a network in a run; half of those on the benchmarks page have less than 50 MB
# What a processor can be held to: "amx" is AVX-512 and a matrix unit.
LEVELS = ("amx", "avx512", "avx2", "generic") if X86 else ("neon", "generic") if ARM else ("generic",)
MATRIX_UNITS = ("amx", "emulated")
MEETINGS_VARY = 1.25  # how many times as long as usual all threads may take to meet, on cores as near as usual
MEETINGS_KEPT = 100  # of the last looks at how soon they meet, which say what is usual
FEATURES = {  # beside vectors, what kernels may use: LLVM's names, and those in keys
    "avx512": {"avx512bf16": "bf16", "avx512fp16": "fp16", "avx512vnni": "vnni"},
    "avx2": {"avxvnni": "vnni"},
    "neon": {},
    "generic": {},
}
AMX_FEATURES = ("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8")  # those of any processor that has tiles

_met: dict[tuple[str, int], deque[float]] = {}  # seconds in which all threads of an instruction set met of late

_memory = functools.cache(allocator.physical_memory)  # to ask the system takes a millisecond


@functools.cache
def host_instruction_set() -> str:
    """The widest of `INSTRUCTION_SETS` that this processor and its operating system offer."""
    if not X86:
        return LEVELS[0]
    features = hardware.features()
    if all(features.get(f"avx512{f}") for f in ("f", "dq", "bw", "vl")):
        return "avx512"
    return "avx2" if features.get("avx2") and features.get("fma") else "generic"


@functools.cache
def host_level() -> str:
    """The first of `LEVELS` that this processor and its operating system offer."""
    vectors, features = host_instruction_set(), hardware.features()
    if vectors != "avx512" or not all(features.get(name) for name in AMX_FEATURES):
        return vectors
    return "amx" if permission.granted() else vectors


def _scipy_version() -> str:
    """Read where it is written: to import SciPy, or to ask for its metadata, takes far longer."""
    spec = importlib.util.find_spec("scipy")
    if spec is None or spec.origin is None:
        return "absent"
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"""^version = (["'])(.+)\1$""", text, re.MULTILINE)
    return found[2] if found else "unknown"


@dataclass(frozen=True)
class CPU(Device):
    """The processor this process runs on.

    All can be set below what the machine offers, to measure what that costs; `current` is all of it.

    Parameters
    ----------
    threads : int
        How many threads compute, at least 1.
    instruction_set : "avx512", "avx2", "neon" or "generic"
        The vectors that kernels are compiled for.
    matrix_unit : "amx", "emulated" or None
        The unit that multiplies tiles, "amx" beside "avx512" only; "emulated" is one made of vectors, to test on any
        processor what runs on AMX.
    model : str, optional
        A machine model, as `Machine.text` has it, by which candidates and estimates are made; that of this machine
        unless given.

    Raises
    ------
    PlanError
        For another number of threads, another instruction set or another unit, for "amx" beside other vectors than
        "avx512", or a model of other threads or vectors.
    """

    threads: int
    instruction_set: str
    matrix_unit: str | None = field(default=None, kw_only=True)
    model: str | None = field(default=None, kw_only=True)
    kind = "cpu"
    pitched = True

    def __post_init__(self) -> None:
        if type(self.threads) is not int or not 1 <= self.threads <= MOST_THREADS:
            raise PlanError(f"threads={self.threads!r}: expected an integer from 1 to {MOST_THREADS}")
        if self.instruction_set not in INSTRUCTION_SETS:
            raise PlanError(f"instruction_set={self.instruction_set!r}: expected {' or '.join(INSTRUCTION_SETS)}")
        if self.matrix_unit not in (None, *MATRIX_UNITS):
            units = " or ".join(MATRIX_UNITS)
            raise PlanError(f"matrix_unit={self.matrix_unit!r}: expected {units}, or None")
        if self.matrix_unit == "amx" and self.instruction_set != "avx512":  # LLVM would not select its instructions
            raise PlanError(f"matrix_unit='amx': expected instruction_set='avx512', got {self.instruction_set!r}")
        if self.model is None:
            return
        given = Machine.parse(self.model)
        if given.threads != self.threads:
            raise PlanError(f"model: expected one measured with {self.threads} threads, got one with {given.threads}")
        if "float32" not in given.peaks.get(self.instruction_set, {}):
            raise PlanError(f"model: expected one that knows {self.instruction_set}, got {', '.join(given.peaks)}")

    def __reduce__(self) -> tuple[Any, ...]:  # its key and versions are found anew, maybe on another machine
        return functools.partial(type(self), **{f.name: getattr(self, f.name) for f in fields(self)}), ()

    @classmethod
    def current(cls, threads: int | None = None, instruction_set: str | None = None) -> CPU:
        """This machine, all of it unless told otherwise (also by `AUTOCONV_NUM_THREADS` and `AUTOCONV_ISA`).

        Parameters
        ----------
        threads : int, optional
        instruction_set : "amx", "avx512", "avx2", "neon" or "generic", optional
            No more than the processor has; "amx" is AVX-512 with a matrix unit.

        Returns
        -------
        CPU

        Raises
        ------
        PlanError
            When the instruction set is not known, or is more than the processor has, or there is no such number of
            threads.
        """
        name = "AUTOCONV_ISA" if instruction_set is None else "instruction_set"
        chosen = instruction_set or os.environ.get("AUTOCONV_ISA") or host_level()
        if chosen not in LEVELS:
            raise PlanError(f"{name}={chosen!r}: expected {' or '.join(LEVELS)}")
        if LEVELS.index(chosen) < LEVELS.index(host_level()):
            raise PlanError(f"{name}={chosen!r}: expected at most what this processor has, {host_level()!r}")
        vectors, unit = ("avx512", "amx") if chosen == "amx" else (chosen, None)
        return cls(count_threads().threads if threads is None else threads, vectors, matrix_unit=unit)

    @property
    def level(self) -> str:
        """Vectors and matrix unit in a word, one of `LEVELS` but for a unit that is emulated."""
        if self.matrix_unit == "emulated":
            return f"{self.instruction_set}+emulated"
        return self.matrix_unit or self.instruction_set

    @functools.cached_property
    def key(self) -> str:
        """Vendor, family, model, stepping, vectors and other features, caches, threads: names alone are too vague."""
        return self._key("+".join((self.level, *self._features)))

    @property
    def lesser_keys(self) -> tuple[str, ...]:
        """The keys of the same processor without its matrix unit, and without other features than vectors.

        What runs there runs here as it does there.
        """
        lesser = ("+".join((self.instruction_set, *self._features)), self.instruction_set)
        return tuple(key for key in dict.fromkeys(map(self._key, lesser)) if key != self.key)

    @property
    def _features(self) -> tuple[str, ...]:
        """What kernels may use beside vectors: a virtual machine may lack some of it, and be the same model else."""
        there = hardware.features()
        return tuple(name for feature, name in FEATURES[self.instruction_set].items() if there.get(feature))

    def _key(self, level: str) -> str:
        facts = self.facts
        numbers = "-".join(str(facts[name]) for name in ("vendor", "family", "model", "stepping"))
        caches = "-".join(f"L{level}:{facts[f'l{level}_bytes'] >> 10}K" for level in (1, 2, 3))
        return f"cpu-{numbers}-{level}-{caches}-threads{self.threads}".replace(" ", "_")

    @functools.cached_property
    def name(self) -> str:
        """Marketing name, with the thread count."""
        return f"{self.facts['name']}, {count(self.threads, 'thread')}, {self.level}"

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Identity and sizes of the processor."""
        l1, l2, l3 = hardware.cache_sizes()
        return {
            **hardware.identity()._asdict(),
            "instruction_set": self.level,
            "threads": self.threads,
            "l1_bytes": l1,
            "l2_bytes": l2,
            "l3_bytes": l3,
        }

    @property
    def machine(self) -> Machine:
        """The measured machine: on record, or measured roughly when it is first asked for."""
        if self.model is not None:
            return Machine.parse(self.model)
        return machine_in_force(self.key, self.instruction_set, self.threads, self.matrix_unit)

    @property
    def estimated_from(self) -> str:
        """The measured machine, and the version of the code that reads it."""
        return f"{code_hash.version(Machine.__module__)} {self.machine.text}"

    def survey(self) -> None:
        """Measure all of the machine, unless that is on record."""
        if self.model is None:
            survey(self.key, self.instruction_set, self.threads, self.matrix_unit)

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """NumPy and SciPy, which the reference family calls, and llvmlite, which compiles the kernels."""
        found = {"numpy": np.__version__, "scipy": _scipy_version(), "llvmlite": "absent"}
        with contextlib.suppress(ImportError):
            import llvmlite

            found["llvmlite"] = llvmlite.__version__
        return found

    @property
    def xp(self) -> ModuleType:
        """NumPy."""
        return np

    def owns(self, array: object) -> bool:
        """Whether it is a NumPy array without a mask, which kernels would pass over."""
        return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)

    def adopt(self, array: object, name: str, *, written: bool = False) -> Array:
        """Anything on the CPU that speaks DLPack, as a NumPy array."""
        kind = type(array).__name__
        if isinstance(array, np.ma.MaskedArray):
            raise ArrayError(f"{name}: expected an array without a mask (array.filled() gives one), got {kind}")
        if not hasattr(array, "__dlpack__"):
            raise ArrayError(f"{name}: expected an array of NumPy, or one that speaks DLPack, got {kind}")
        signed = with_its_sign(array, name, written)
        try:
            return np.from_dlpack(signed)
        except (BufferError, RuntimeError, TypeError, ValueError) as failure:
            raise ArrayError(f"{name}: expected an array that can be read on the CPU, got {kind}: {failure}") from None

    def ready(self, array: Array) -> bool:
        """Contiguous, elements on their own boundaries."""
        flags = array.flags
        return bool(flags.c_contiguous and flags.aligned)

    def writable(self, array: Array) -> bool:
        """NumPy's own flag."""
        return bool(array.flags.writeable)

    def memory(self) -> int:
        """What the machine has, or its part for this process; a lot where the system does not say."""
        return _memory() or allocator.UNKNOWN

    def memory_available(self) -> int:
        """What the system says is available to this process; a lot where it does not say."""
        return allocator.available_memory()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array that starts on a cache line, in memory used before if there is any."""
        dtype = np.dtype(dtype)
        return allocator.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def stream(self) -> int:
        """The calling thread."""
        return threading.get_ident()

    def synchronize(self) -> None:
        """Nothing to wait for: kernels return when they are done."""

    def stopwatch(self, launch: Callable[[Operands], None], operands: Operands) -> Stopwatch:
        """Wall-clock samples; for `cold`, as much is read first as a network reads between two runs of a layer."""
        clock = time.perf_counter

        def hot() -> float:
            start = clock()
            launch(operands)
            return clock() - start

        def cold() -> float:
            self.settle(operands.workspace, operands.out, operands.a, filters=[operands.b])
            return hot()

        return Stopwatch(cold=cold, hot=hot)

    def get_ready_for(self, layer: ConvLayer, candidates: Sequence[tuple[Algorithm[Any], Params]]) -> None:
        """Begin to fill the memory that pushes filters out of the caches: the same for any candidates."""
        del layer, candidates
        allocator.filled(self._elsewhere)

    def settle(self, *warm: Array, filters: Iterable[Array] = ()) -> None:
        """Leave the machine as a layer in a network finds it: threads and matrix unit awake, and some arrays in cache.

        Parameters
        ----------
        *warm : array
            Contiguous ones, in cache as far as they fit, the last of all: scratch memory and the output, where other
            layers had theirs shortly before, and the inputs, as the layer before left them.
        filters : iterable of array
            What the run before has read, and since then as much as a network reads, every thread its part: a large last
            level keeps it so long, though not what many candidates have, each its own.
        """
        from autoconv.cpu import pool
        from autoconv.cpu.machine.pace import read_by_all, wake_unit

        for array in (array for array in filters if array.nbytes < 2 * self.machine.beyond):  # no cache keeps others
            allocator.read(array)
        elsewhere = allocator.filled(self._elsewhere)()
        if pool.available():
            read_by_all(self.instruction_set, self.threads)(elsewhere)
        else:
            allocator.read(elsewhere)
        for array in warm:
            allocator.read(array)
        if pool.available():  # the first call wakes them
            if (unit := self._unit()) is not None:
                wake_unit(self.instruction_set, unit, self.threads)
            pool.wake(self.instruction_set, self.threads)
            pool.wake(self.instruction_set, self.threads)

    @property
    def _elsewhere(self) -> int:
        """Bytes that other layers read between two runs of one, or that no cache keeps."""
        return min(2 * self.machine.beyond, NETWORK_BYTES)

    def peak_flops(self, dtype: str) -> float:
        """Multiply-adds on registers, of all threads; 16-bit types are computed with in float32."""
        return self.machine.flops(self.instruction_set, dtype)

    def pace(self) -> float:
        """By bursts of multiply-adds on all threads and of products of tiles, and how soon all threads meet.

        Whichever is further from its best counts. A unit that multiplies tiles may be slow while vectors are not:
        processors beside this one may use it too. Threads meet late while they are on cores far from one another, as
        they may have been when the machine was measured: near is who meets as soon as in one look of four of late. So
        near threads are waited for where they often are, and not where a busy host hardly ever has them so. Nothing is
        known of a machine whose model is given.
        """
        from autoconv.cpu import pool
        from autoconv.cpu.machine.pace import meeting, meter, unit_rate

        if self.model is not None or not pool.available():
            return 1.0
        pace = self.peak_flops("float32") / meter(self.instruction_set, self.threads)()
        if (unit := self._unit()) is not None:
            peak = self.machine.tiles(unit, "bfloat16")
            pace = max(pace, peak / unit_rate(self.instruction_set, unit, self.threads))
        if self.threads > 1 and self.machine.call and self.machine.barrier:
            how = self.instruction_set, self.threads
            met = _met.setdefault(how, deque([self.machine.call + self.machine.barrier], MEETINGS_KEPT))
            met.append(meeting(*how))
            pace = max(pace, met[-1] / sorted(met)[len(met) // 4] / MEETINGS_VARY)
        return pace

    def _unit(self) -> str | None:
        """The matrix unit in hardware, where this process may use it."""
        return self.matrix_unit if self.matrix_unit == "amx" and permission.granted() else None

    def bandwidth(self) -> float:
        """What all threads read from memory."""
        return self.machine.memory
