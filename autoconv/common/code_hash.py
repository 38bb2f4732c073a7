"""Versions of code: a hash of what a family of algorithms is made of, without its comments and docstrings.

A family is made of its own folder (or file), and of every module of the shared rooms that it imports, directly or
not: the language it writes kernels in, what it shares with other families, `ConvLayer`. CUDA text that lies beside
any of these belongs to it. The device, the pool and the contract of an algorithm do not: what they change, they
change for every family alike.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path

from autoconv.common import machine_code

PACKAGE = Path(__file__).parents[1]
SINGLE = ("layer.py", "common/winograd_math.py")  # files outside a device's rooms that decide what a kernel is
CUDA_TEXT = (".cu", ".cuh")
_CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def python_code(text: str) -> str:
    r"""Python source without comments, docstrings and blank lines.

    >>> python_code('def f():  # why\n    "What."\n    return 1\n')
    'def f():\n    return 1'
    """
    lines = text.splitlines(keepends=True)
    previous = tokenize.NEWLINE
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    cut: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        alone = previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT) and following.type == tokenize.NEWLINE
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and alone):
            cut.append((token.start, token.end))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    for (top, left), (bottom, right) in reversed(cut):
        lines[top - 1 : bottom] = [lines[top - 1][:left] + lines[bottom - 1][right:]]
    return "\n".join(line for line in map(str.rstrip, "".join(lines).splitlines()) if line)


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
    """
    files = _files()
    own = _file_of(module, files)
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
def _files() -> dict[str, tuple[str, list[str]]]:
    """Of every file of code, by its path in the package: the hash of its code, and the files that it imports.

    Kept on disk under what the system notes of a file when it is written: to read all of them takes far longer than
    to find and load a kernel.
    """
    states = sorted(_walk(str(PACKAGE)))
    key = hashlib.sha256(repr((str(PACKAGE), states)).encode()).digest()
    stored = machine_code.load(key)
    if stored is None:
        names = {name for name, *_ in states}
        stored = json.dumps({name: _read(name, names) for name in sorted(names)}).encode()
        machine_code.save(key, stored)
    found: dict[str, tuple[str, list[str]]] = json.loads(stored)
    return found


def _walk(folder: str, prefix: str = "") -> Iterator[tuple[str, int, int, int, int]]:
    """Every file of code below a folder, with what the system notes of it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif entry.name.endswith((".py", *CUDA_TEXT)):
                s = entry.stat()
                yield f"{prefix}{entry.name}", s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _read(name: str, names: Collection[str]) -> tuple[str, list[str]]:
    text = (PACKAGE / name).read_text(encoding="utf-8")
    code, imported = (python_code(text), _imports(text, names)) if name.endswith(".py") else (cuda_code(text), [])
    return hashlib.sha256(code.encode()).hexdigest(), imported


def _imports(text: str, names: Collection[str]) -> list[str]:
    """The files of this package that a module imports when it is loaded or run, not those for types alone."""
    found = set()
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE.name):
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {_file_of(module, names) or _file_of(node.module, names) for module in modules}
        elif isinstance(node, ast.Import):
            found |= {_file_of(alias.name, names) for alias in node.names}
        else:
            left += ast.iter_child_nodes(node)
    return sorted(found - {""})


def _file_of(module: str, names: Collection[str]) -> str:
    """The path of a module in the package; empty where there is none such."""
    path = "/".join(module.split(".")[1:])
    return next((name for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if name in names), "")
