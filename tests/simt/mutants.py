"""Mutants of the kernels: the texts with one barrier, wait, commit, fence or check left out, and who notices.

What is left out is found in the text, so that a new kernel is covered as it stands there:

- a statement that is a call whose name says that it orders (`__syncthreads`, `wait_...`, `commit_...`, `fence_...`);
- a comparison, or a call of `within`, that the compiler cannot decide. Where it lets a thread go on it is
  replaced by true, where it sends a thread away, or chooses a zero, by false. The conditions of loops stay.

All mutants of a text are built at once, each behind a flag, and a process of its own runs each of them. A
mutant is caught by a wrong answer in some schedule, a damaged fence, a complaint of the emulator, a crash,
a hang, or a report of a sanitizer. Algorithms of one text are tried together.
`python -m simt.mutants ALGORITHM` prints what became of each.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from simt.cases import OURS, checker
from simt.emulator import Emulated, EmulationError, build, launcher, sanitized

from autoconv.algorithm import Params
from autoconv.bench.gpu.cases import SCHEDULES, edge_cases, planned
from autoconv.cuda.codegen.source import GENERATED, Unit, file_text, files_of
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.layer import ConvLayer

SECONDS = 15  # of processor time that a case may take in all schedules
PATIENCE = 4  # times what the text itself takes, until a mutant counts as one that hangs
MANY = 30  # cases to an algorithm, of which only each STEP-th is run
STEP = 5  # prime to the three directions and the four epilogues that the cases go through
SANITIZED = 6  # of them under sanitizers
CHOICE = "SIMT_MUTANT"  # the environment's name for the mutant that a program is

Probe = tuple[CudaAlgorithm, ConvLayer, Params, int]  # the last is the schedule

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


def _forced(text: str, start: int, end: int) -> bool:
    """What a check becomes when it is left out."""
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
        found.append(Site(file, start, end, _forced(text, start, end)))
    found.sort(key=lambda site: site.start)
    return tuple(b for a, b in itertools.pairwise([Site(file, 0, 0, None), *found]) if b.start >= a.end)


def files(*names: str) -> tuple[str, ...]:
    """All files of some kernels' texts that may have sites: `ptx.cuh` is what emulates."""
    all_files = itertools.chain.from_iterable(map(files_of, names))
    return tuple(name for name in dict.fromkeys(all_files) if name not in (GENERATED, "codegen/ptx.cuh"))


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


def texts() -> list[CudaAlgorithm]:
    """The first algorithm of each text."""
    kernels = [a for a in OURS if isinstance(a, CudaAlgorithm) and a.files]
    return list({algorithm.files: algorithm for algorithm in reversed(kernels)}.values())[::-1]


def judged(algorithm: CudaAlgorithm) -> list[str]:
    """The files of a text that none before it has: what another text has, this one may not need all of."""
    before = itertools.takewhile(lambda other: other.files != algorithm.files, texts())
    theirs = {file for other in before for file in files(*other.files)}
    return [file for file in files(*algorithm.files) if file not in theirs]


def relatives(algorithm: CudaAlgorithm) -> list[CudaAlgorithm]:
    """The algorithms whose kernels are the same text."""
    return [a for a in OURS if isinstance(a, CudaAlgorithm) and a.files == algorithm.files]


def probes(algorithm: CudaAlgorithm, step: int) -> tuple[list[Probe], list[Probe]]:
    """What is planned for a text; and some of the edges, spread evenly: all of them where they are few."""
    asked, edges = [], []
    for relative in relatives(algorithm):
        asked += [(relative, *case) for case in planned(relative)]
        found = [(relative, *case) for case in edge_cases(relative)]
        edges += found[:: step if len(found) > MANY else 1]
    return asked, edges


def fates(algorithm: CudaAlgorithm, step: int = STEP) -> dict[Site, str]:
    """What caught the mutant of each site that this text is judged by and comes by; "" for a survivor.

    It is over when each of these sites was come by, and none survives. A check decides by values, which are the
    same in every schedule, so each case tries it in one.
    """
    found: dict[Site, str] = {}
    own = {site for file in judged(algorithm) for site in sites(file)}
    for cases in probes(algorithm, step):
        reaching: dict[Site, list[Callable[[Emulated], None]]] = {}
        for relative, layer, params, seed in cases:
            if own <= found.keys() and all(found.values()):
                return found
            check = checker(relative, layer, params)
            began = time.process_time()
            check(Mutated(schedule=seed))
            seconds = SCHEDULES * (time.process_time() - began)
            if seconds > SECONDS:
                continue
            seeds = [(seed + i) % SCHEDULES for i in range(SCHEDULES)]
            reached = own & set(_reached(relative.units(layer, params)))  # a kernel that it calls has a text of its own
            for site in sorted(reached, key=lambda site: (site.file, site.start)):
                if not found.get(site):
                    tried = seeds if site.forced is None else seeds[:1]
                    wrong = _fails(partial(_try, check, site, tried), 2 + PATIENCE * seconds)
                    found[site] = f"{layer} {params}" if wrong else ""
                    reaching.setdefault(site, []).append(check)
        _sanitize(reaching, found)
    return found


def _try(check: Callable[[Emulated], None], site: Site | None, seeds: Iterable[int], sanitizer: str = "") -> None:
    for seed in seeds:
        check(Mutated(schedule=seed, site=site, sanitizer=sanitizer))


def _sanitize(reaching: dict[Site, list[Callable[[Emulated], None]]], found: dict[Site, str]) -> None:
    """Try survivors once more, on the first cases that came by each, under a sanitizer that the text itself passes."""
    passed: set[tuple[Callable[[Emulated], None], str]] = set()
    for site, checks in reaching.items():
        sanitizer = "thread" if site.forced is None else "address"
        for check in checks[:SANITIZED]:
            if found[site]:
                break
            if (check, sanitizer) not in passed:
                _try(check, None, [0], sanitizer)
                passed.add((check, sanitizer))
            if _fails(partial(_try, check, site, [0], sanitizer), PATIENCE * SECONDS):
                found[site] = f"{sanitizer} sanitizer"


if __name__ == "__main__":
    named = next(a for a in OURS if isinstance(a, CudaAlgorithm) and a.name == sys.argv[1])
    json.dump(
        [[*vars(site).values(), fate] for site, fate in fates(named, *map(int, sys.argv[2:])).items()], sys.stdout
    )
