"""Versions of code: a hash of what a family of algorithms is made of, without its comments and docstrings.

A family is made of its own folder (or file), and of every module of the shared rooms that it imports, directly or
not: the language it writes kernels in, what it shares with other families, `ConvLayer`. CUDA text that lies beside
any of these belongs to it. The device, the pool and the contract of an algorithm do not: what they change, they
change for every family alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from autoconv.common import machine_code

PACKAGE = Path(__file__).parents[1]
# Files outside a device's rooms that decide what a kernel is.
SINGLE = (
    "layer.py",
    "common/arrays.py",
    *(f"common/epilogue/{name}.py" for name in ("activations", "expressions", "quantization")),
    "common/winograd_math.py",
)
CUDA_TEXT = (".cu", ".cuh")
State = tuple[str, int, int, int, int]
# What may hold a docstring or a comment, or what looks like one; every alternative begins with a character of its own,
# which makes the search five times as fast.
_PYTHON = re.compile(
    r"""\#[^\n]* | \( | \) | \[ | \] | \{ | \}
    | "(?:""(?:\\.|(?!"{3}).)*"{3} | (?:\\.|[^"\\\n])*")
    | '(?:''(?:\\.|(?!'{3}).)*'{3} | (?:\\.|[^'\\\n])*')""",
    re.DOTALL | re.VERBOSE,
)
_PREFIX = "bfruBFRU"  # of a string
_FOR_TYPES = re.compile(r"^( *)if TYPE_CHECKING:\n(?:\1 [^\n]*(?:\n|\Z))+", re.MULTILINE)
_IMPORT = re.compile(r"^ *(?:from (?P<module>[\w.]+) )?import (?P<names>\([^)]*\)|[^\n]*)", re.MULTILINE)
_CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def python_code(text: str) -> str:
    r"""Python source without comments, docstrings and blank lines.

    Read by a pattern: `tokenize` takes ten times as long, and a process that cannot keep the result waits for it.

    >>> python_code('def f():  # why\n    "What."\n    return 1\n')
    'def f():\n    return 1'
    """
    kept, end, depth = [], 0, 0
    for token in _PYTHON.finditer(text):
        start, past = token.span()
        first = text[start]
        if first in "([{":
            depth += 1
        elif first in ")]}":
            depth -= 1
        elif first == "#" or (not depth and _alone(text, start, past)):
            kept.append(text[end:start].rstrip(_PREFIX) if first != "#" else text[end:start])
            end = past
    return "\n".join(line for line in map(str.rstrip, "".join([*kept, text[end:]]).split("\n")) if line)


def _alone(text: str, start: int, end: int) -> bool:
    """Whether nothing else stands on the lines of a string that no bracket encloses, so that it is a docstring."""
    first, past = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    around = text[first:start].rstrip(_PREFIX) + text[end : past if past >= 0 else None]
    return not around.strip(" \t") and not text.endswith("\\\n", 0, first)


def cuda_code(text: str) -> str:
    """CUDA C++ without comments and blank lines."""
    return "\n".join(line for line in map(str.rstrip, _CUDA_COMMENT.sub("", text).splitlines()) if line)


@functools.cache
def version(module: str) -> str:
    """The version of what a module belongs to: a hash of its folder and of all that decides it.

    Parameters
    ----------
    module : str
        The full name of a module: one of a family's folder, or a family of a single file.

    Returns
    -------
    12 hexadecimal digits, the same in every process and with every version of Python.

    Raises
    ------
    NotImplementedError
        For a module that is no file of this package: an algorithm from elsewhere has to define `version` itself.
    """
    package, room, *_ = *module.split("."), ""
    files = _files(room) if package == PACKAGE.name else {}
    own = _file_of(module, files)
    if not own:
        raise NotImplementedError(f"{module}: expected a module of {PACKAGE.name}, got another; define `version` there")
    folder = own.rpartition("/")[0]
    found: set[str] = set()
    left = [own] if folder.count("/") < 1 else [name for name in files if name.rpartition("/")[0] == folder]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += (other for other in files[name][1] if other in SINGLE or other.count("/") > 1)
    rooms = {name.rpartition("/")[0] for name in found}
    found |= {name for name in files if name.endswith(CUDA_TEXT) and name.rpartition("/")[0] in rooms}
    return hashlib.sha256("".join(f"{name} {files[name][0]}\n" for name in sorted(found)).encode()).hexdigest()[:12]


@functools.cache
def _files(room: str) -> dict[str, tuple[str, list[str]]]:
    """Of a device's files and those of `SINGLE`, by their paths in the package: a hash of the code, and its imports.

    Kept on disk under what the system notes of a file when it is written: to read all of them takes far longer than
    to find and load a kernel.
    """
    states = [_state(name, (PACKAGE / name).stat()) for name in SINGLE]
    if (PACKAGE / room).is_dir():
        states += _walk(str(PACKAGE / room), f"{room}/")
    key = hashlib.sha256(repr((str(PACKAGE), sorted(states))).encode()).digest()
    stored = machine_code.load(key)
    if stored is None:
        names = {name for name, *_ in states}
        stored = json.dumps({name: _read(name, names) for name in sorted(names)}).encode()
        machine_code.save(key, stored)
    found: dict[str, tuple[str, list[str]]] = json.loads(stored)
    return found


def _walk(folder: str, prefix: str) -> Iterator[State]:
    """Every file of code below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif entry.name.endswith((".py", *CUDA_TEXT)):
                yield _state(f"{prefix}{entry.name}", entry.stat())


def _state(name: str, s: os.stat_result) -> State:
    """A file's name, and what the system notes of it when it is written."""
    return name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _read(name: str, names: Collection[str]) -> tuple[str, list[str]]:
    text = (PACKAGE / name).read_text(encoding="utf-8")
    code = python_code(text) if name.endswith(".py") else cuda_code(text)
    return hashlib.sha256(code.encode()).hexdigest(), _imports(code, names) if name.endswith(".py") else []


def _imports(code: str, names: Collection[str]) -> list[str]:
    """The files of this package that code imports when it is loaded or run, not those for types alone.

    Read by a pattern, too: a syntax tree takes four times as long.
    """
    found = set()
    for one in _IMPORT.finditer(_FOR_TYPES.sub("", code)):
        imported = [name.split()[0] for name in one["names"].strip("()").split(",") if name.strip()]
        if (module := one["module"]) is None:
            found |= {_file_of(name, names) for name in imported}
        elif module.startswith(PACKAGE.name):
            found |= {_file_of(f"{module}.{name}", names) or _file_of(module, names) for name in imported}
    return sorted(found - {""})


def _file_of(module: str, names: Collection[str]) -> str:
    """The path of a module in the package; empty where there is none such."""
    path = "/".join(module.split(".")[1:])
    return next((name for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if name in names), "")
