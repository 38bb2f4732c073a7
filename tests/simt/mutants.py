"""Mutants of the kernels: the texts with one barrier, wait, commit, fence or check left out, and who notices.

What is left out is found in the text, so that a new kernel is covered as it stands there:

- a statement that is a call whose name says that it orders (`__syncthreads`, `wait_...`, `commit_...`, `fence_...`);
- a comparison, or a call of `within`, that the compiler cannot decide. Where it lets a thread go on it is
  replaced by true, where it sends a thread away, or chooses a zero, by false. The conditions of loops stay.

All mutants of a text are built at once, each behind a flag, and a process of its own runs each of them. A
mutant is caught by a wrong answer in some schedule, a damaged fence, a complaint of the emulator, a crash,
a hang, or a report of a sanitizer. A file that several texts have is tried in one after the other.
`python -m simt.mutants FILE` prints what became of each of a file.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from layers import edge
from simt.cases import OURS, checker, epilogue_checker, operator_checker, units_of
from simt.emulator import Emulated, EmulationError, build, launcher, sanitized

from autoconv.bench.gpu.cases import FULL_EPILOGUE, SCHEDULES, Case, edge_cases, planned
from autoconv.bench.gpu.networks import NOT_FINITE, OPERATORS
from autoconv.cuda import operators
from autoconv.cuda.codegen.source import GENERATED, GENERATED_SHAPES, Unit, file_text, files_of
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.cuda.libraries.algorithm import epilogue_unit
from autoconv.layer import LAYOUTS

SECONDS = 15  # of processor time that a case may take in all schedules
PATIENCE = 4  # times what the text itself takes, until a mutant counts as one that hangs
MANY = 30  # cases to an algorithm, of which only each STEP-th is run
STEP = 5  # prime to the three directions and the four epilogues that the cases go through
SANITIZED = 6  # of them under sanitizers
CHOICE = "SIMT_MUTANT"  # the environment's name for the mutant that a program is

Check = Callable[[Emulated], None]
Probe = tuple[str, tuple[Unit, ...], Check, int]  # what, by which kernels, what checks it, the schedule

KERNELS = [algorithm for algorithm in OURS if isinstance(algorithm, CudaAlgorithm)]
OPERATOR_FILES = sorted(f"operators/{path.name}" for path in Path(operators.__path__[0]).glob("*.cu"))
EPILOGUE_FILE = "libraries/epilogue.cu"
WITHOUT = (GENERATED, GENERATED_SHAPES, "codegen/ptx.cuh")  # sites: what is generated, and what emulates

_ORDERS = re.compile(
    r"(?<=[;{})])\s*(?P<code>\w*(?:(?<!a)sync|wait|commit|fence|arrive|expect|barrier)\w*(<[^;{]*>)?\([^;{]*\));"
)
_COMPARES = re.compile(r" (?:<|<=|>|>=|==|!=) |(?<!bool )\bwithin\(")
_FIXED = re.compile(
    r"\bfor \(|\bstatic_assert\(|\bif constexpr \(|\btemplate <|^#.*$|\bconstexpr\b|\busing\b", re.MULTILINE
)
_ZERO = re.compile(r"\s*\?\s*(-1|0|nullptr|Acc\(0\))\s*:")
_CONSTANT = re.compile(r"[A-Z]\w*|sizeof|static_cast|int|long")


@dataclass(frozen=True)
class Site:
    """What one mutant leaves out.

    `start` and `end` are places in the file's text without comments; `forced` is the value a check is replaced
    by, None for a statement.
    """

    file: str
    start: int
    end: int
    forced: bool | None

    @property
    def code(self) -> str:
        return " ".join(file_text(self.file)[self.start : self.end].split())

    @property
    def line(self) -> str:
        """The line it begins in."""
        text = file_text(self.file)
        return text[text.rfind("\n", 0, self.start) + 1 : (text + "\n").index("\n", self.start)].strip()

    @property
    def name(self) -> str:
        """What is left out and where: its line, and how many like it come before."""
        same = [s for s in sites(self.file) if (s.code, s.line) == (self.code, self.line)]
        again = f" ({same.index(self) + 1})" if len(same) > 1 else ""
        return f"{self.code} | {self.line}{again}"

    def mutable(self, number: int) -> str:
        """Its code behind a flag."""
        code = file_text(self.file)[self.start : self.end]
        if self.forced is None:
            return f"(void)(simt_mutated({number}) || ({code}, true))"
        return f"(simt_mutated({number}) || ({code}))" if self.forced else f"(!simt_mutated({number}) && ({code}))"


def _matching(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({[") - (text[i] in ")}]")
        if depth == 0:
            return i
    raise ValueError(f"{text[start : start + 40]!r} is never closed")


def _fixed(text: str) -> list[tuple[int, int]]:
    """Where nothing is decided when a kernel runs: constants, templates, and loops, whose ends are no checks."""
    spans = []
    for match in _FIXED.finditer(text):
        word, end = match[0], match.end()
        if word.endswith("("):
            end = _matching(text, end - 1)
        elif word == "template <":
            end = text.index(">", end)
        elif word == "using":
            end = text.index(";", end)
        elif word == "constexpr" and not text.startswith("if ", match.start() - 3):
            ends = [i for i in (text.find(";", end), text.find("{", end)) if i >= 0]
            end = _matching(text, min(ends)) if text[min(ends)] == "{" else min(ends)
        spans.append((match.start(), end))
    return spans


def _bounds(text: str, at: int, length: int) -> tuple[int, int]:
    """Where the comparison around an operator begins and ends: at what binds less, or a bracket."""
    start, depth = at, 0
    while depth or not (
        text[start - 1] in "({[,;?=" or text[start - 2 : start] in ("&&", "||") or text[start - 2 : start] == " :"
    ):
        start -= 1
        depth += (text[start] in ")]}") - (text[start] in "([{")
    end, depth = at + length, 0
    while depth or not (text[end] in ")}],;?" or text[end : end + 3] in (" &&", " ||") or text[end : end + 3] == " : "):
        depth += (text[end] in "([{") - (text[end] in ")]}")
        end += 1
    found = text[start:end]
    start += len(found) - len(found.lstrip())
    start += len("return ") if text.startswith("return ", start) else 0
    return start, end - (len(found) - len(found.rstrip()))


def _forced(text: str, end: int) -> bool:
    """What a check that ends there becomes when it is left out."""
    depth, i = 0, end  # to the end of the whole condition
    while depth or text[i] not in "?;,)}":
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    if text[i] == "?":
        return not _ZERO.match(text, i)
    if text[i] == ")":
        return not re.match(r"\)\s*(\{\s*)?(return|continue|break)\b", text[i:])
    return True


@functools.cache
def sites(file: str) -> tuple[Site, ...]:
    """All that can be left out of a file, in its order."""
    text = file_text(file)
    found = [Site(file, *match.span("code"), None) for match in _ORDERS.finditer(text)]
    fixed = _fixed(text)
    for match in _COMPARES.finditer(text):
        at = match.start()
        if any(start <= at < end for start, end in fixed):
            continue
        start, end = _bounds(text, at, 0 if match[0] == "within(" else len(match[0]))
        words = re.findall(r"[A-Za-z_]\w*", text[start:end])
        if all(_CONSTANT.fullmatch(word) for word in words):
            continue
        found.append(Site(file, start, end, _forced(text, end)))
    found.sort(key=lambda site: site.start)
    return tuple(b for a, b in itertools.pairwise([Site(file, 0, 0, None), *found]) if b.start >= a.end)


def files(*names: str) -> tuple[str, ...]:
    """All files of some kernels' texts that may have sites."""
    found = itertools.chain.from_iterable(map(files_of, names))
    return tuple(name for name in dict.fromkeys(found) if name not in WITHOUT)


def sites_of(unit: Unit) -> tuple[Site, ...]:
    """The sites of a unit's text; a mutant's number is its place here."""
    return tuple(site for file in files(unit.file) for site in sites(file))


@functools.cache
def mutable(unit: Unit) -> str:
    """The unit's text with every mutant in it: `simt_mutate`, or the environment, chooses one."""
    text, number = unit.text, 0
    for file in files(unit.file):
        changed, end = "", 0
        for site in sites(file):
            changed += file_text(file)[end : site.start] + site.mutable(number)
            number, end = number + 1, site.end
        text = text.replace(file_text(file), changed + file_text(file)[end:])
    return f"""
static int simt_mutant = std::getenv("{CHOICE}") ? std::atoi(std::getenv("{CHOICE}")) : -1;
extern "C" {{
void simt_mutate(int number) {{ simt_mutant = number; }}
unsigned char simt_reached[{number + 1}];
}}
__attribute__((noinline)) UNWATCHED static bool simt_mutated(int number) {{
    simt_reached[number] = 1;
    return number == simt_mutant;
}}
{text}"""


def _library(unit: Unit, flags: tuple[str, ...]) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(mutable(unit), flags)))


@dataclass(frozen=True)
class Mutated(Emulated):
    """An emulated GPU whose kernels lack one site."""

    site: Site | None = None

    def load(self, unit: Unit) -> Callable[..., None]:
        mine = sites_of(unit)
        number = mine.index(self.site) if self.site in mine else -1
        if self.sanitizer:
            run_sanitized = sanitized(unit, self.sanitizer, self.schedule, mutable(unit))

            def launch(*arguments: Any) -> None:
                os.environ[CHOICE] = str(number)  # now: another unit's number may differ
                run_sanitized(*arguments)

            return launch
        _library(unit, self.flags).simt_mutate(number)
        return launcher(unit, self.flags, self.schedule, mutable(unit))


def _reached(units: tuple[Unit, ...]) -> set[Site]:
    """The sites that these kernels came by since this process loaded them."""
    found: set[Site] = set()
    for unit in units:
        mine = sites_of(unit)
        flags = (ctypes.c_ubyte * len(mine)).in_dll(_library(unit, Emulated.flags), "simt_reached")
        found |= {site for site, flag in zip(mine, flags, strict=True) if flag}
    return found


def _fails(attempt: Callable[[], object], seconds: float) -> bool:
    """Whether an attempt goes wrong or takes longer, in a process of its own: it may well crash or hang.

    The time is of a processor, which no busy machine takes away, and of each process that the attempt starts.
    """
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 3
        try:
            attempt()
            code = 0
        except (AssertionError, EmulationError):
            code = 1
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 3:
        raise RuntimeError("a mutant's run ended in neither an answer nor a complaint")
    return status != 0


def all_files() -> tuple[str, ...]:
    """The files of all kernels that have sites, each once."""
    own = itertools.chain.from_iterable(algorithm.files for algorithm in KERNELS)
    return tuple(filter(sites, files(*own, *OPERATOR_FILES, EPILOGUE_FILE)))


def probes(file: str, step: int) -> Iterator[Iterator[Probe]]:
    """What is planned for an algorithm whose text has a file, then some of its edges; or an operator's cases.

    Edges are spread evenly, or all of them where they are few.
    """
    for algorithm in KERNELS:
        if file in files(*algorithm.files):
            yield _cases(algorithm, planned(algorithm))
            edges = list(edge_cases(algorithm))
            yield _cases(algorithm, edges[:: step if len(edges) > MANY else 1])
    for name in OPERATORS:
        if any(file in files(unit.file) for unit in units_of(name)):
            yield _operator_cases(name)
    if file == EPILOGUE_FILE:
        layers = [edge("remainders", layout=layout, **FULL_EPILOGUE) for layout in LAYOUTS]
        yield (("epilogue", (epilogue_unit(layer),), epilogue_checker(layer), 0) for layer in layers)


def _cases(algorithm: CudaAlgorithm, cases: Iterable[Case]) -> Iterator[Probe]:
    for layer, params, seed in cases:
        check = checker(algorithm, layer, params)
        yield f"{algorithm.name} {params} on {layer}", algorithm.units(layer, params), check, seed


def _operator_cases(name: str) -> Iterator[Probe]:
    for not_finite in (False, True)[: 1 + (name in NOT_FINITE)]:
        yield name, units_of(name), operator_checker(name, not_finite), 0


def fates(file: str, step: int = STEP) -> dict[Site, str]:
    """What caught the mutant of each site of a file that the cases come by; "" for a survivor.

    It is over when each site was come by, and none survives. A check decides by values, which are the same in every
    schedule, so each case tries it in one.
    """
    found: dict[Site, str] = {}
    own = set(sites(file))
    for cases in probes(file, step):
        reaching: dict[Site, list[tuple[str, Check]]] = {}
        for name, units, check, seed in cases:
            if own <= found.keys() and all(found.values()):
                return found
            began = time.process_time()
            check(Mutated(schedule=seed))
            seconds = SCHEDULES * (time.process_time() - began)
            if seconds > SECONDS:
                continue
            seeds = [(seed + i) % SCHEDULES for i in range(SCHEDULES)]
            for site in sorted(own & _reached(units), key=lambda site: site.start):
                if not found.get(site):
                    tried = seeds if site.forced is None else seeds[:1]
                    wrong = _fails(partial(_try, check, site, tried), 2 + PATIENCE * seconds)
                    found[site] = name if wrong else ""
                    reaching.setdefault(site, []).append((name, check))
        _sanitize(reaching, found)
    return found


def _try(check: Check, site: Site | None, seeds: Iterable[int], sanitizer: str = "") -> None:
    for seed in seeds:
        check(Mutated(schedule=seed, site=site, sanitizer=sanitizer))


def _sanitize(reaching: dict[Site, list[tuple[str, Check]]], found: dict[Site, str]) -> None:
    """Try survivors once more, on the first cases that came by each, under a sanitizer that the text itself passes."""
    passed: set[tuple[Check, str]] = set()
    for site, cases in reaching.items():
        sanitizer = "thread" if site.forced is None else "address"
        for name, check in cases[:SANITIZED]:
            if found[site]:
                break
            if (check, sanitizer) not in passed:
                _try(check, None, [0], sanitizer)
                passed.add((check, sanitizer))
            if _fails(partial(_try, check, site, [0], sanitizer), PATIENCE * SECONDS):
                found[site] = f"{name}, {sanitizer} sanitizer"


if __name__ == "__main__":
    caught = fates(sys.argv[1], *map(int, sys.argv[2:]))
    json.dump([[*vars(site).values(), fate] for site, fate in caught.items()], sys.stdout)
