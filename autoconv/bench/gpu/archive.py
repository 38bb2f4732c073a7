"""A folder of results as one archive in parts, so that the next machine goes on where the last one ended.

It holds all that was found and all that was compiled: results, records, our kernels, CuPy's. The parts of `state.tgz`
are `state.tgz.000`, `state.tgz.001`, ...: none is larger than whatever carries them allows.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoconv.errors import AutoconvError

# Python has it from 3.11.4 on; without, what `unpack` checks itself has to suffice.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


class ArchiveError(AutoconvError, RuntimeError):
    """An archive of which something is missing, or damaged."""


@contextlib.contextmanager
def carried(archive: Path, folder: Path, part_bytes: int) -> Iterator[None]:
    """A folder that comes from the archive where it is new, and goes there at the end, whatever happens in between."""
    if not folder.exists() or not any(folder.iterdir()):
        unpack(archive, folder)
    try:
        yield
    finally:
        if folder.exists():
            pack(folder, archive, part_bytes)


def pack(folder: Path, archive: Path, part_bytes: int) -> list[Path]:
    """Write a folder to an archive, in the place of the one that is there.

    Parameters
    ----------
    folder : Path
        In which nobody writes meanwhile.
    archive : Path
        What the names of the parts begin with; outside of the folder.
    part_bytes : int
        Most bytes of a part.

    Returns
    -------
    list of Path
        The parts.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    with _Parts(archive, part_bytes) as file, tarfile.open(fileobj=file, mode="w|gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    # the new parts are whole: they take the places of the old ones, of which there may have been more
    made = [fresh.replace(_part(archive, number)) for number, fresh in enumerate(file.written)]
    for number in itertools.takewhile(lambda n: _part(archive, n).exists(), itertools.count(len(made))):
        _part(archive, number).unlink()
    return made


def unpack(archive: Path, folder: Path) -> bool:
    """Fill a folder from an archive; whether there was one.

    Raises
    ------
    ArchiveError
        When a part is missing or damaged, or holds what is no file or folder inside; the folder is as it was.
    """
    parts = list(_existing(archive))
    if not parts:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for extracting in (False, True):  # read to the end once before anything is written
        with _Joined(parts) as file:
            try:
                with tarfile.open(fileobj=file, mode="r|gz") as tar:
                    if extracting:
                        tar.extractall(folder, **SAFELY)
                    else:
                        for member in tar:
                            _check(archive, member)
            except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
                names = f"{parts[0].name} to {parts[-1].name}"
                raise ArchiveError(f"{archive}: expected a whole archive in {names}: {error}") from None
    return True


def _check(archive: Path, member: tarfile.TarInfo) -> None:
    """Refuse what `pack` never writes: links and devices, and what lies outside of the folder."""
    name = Path(member.name)
    if name.is_absolute() or ".." in name.parts or not (member.isfile() or member.isdir()):
        raise ArchiveError(f"{archive}: expected files and folders below one, got {member.name!r}")


def _part(archive: Path, number: int) -> Path:
    return archive.with_name(f"{archive.name}.{number:03d}")


def _existing(archive: Path) -> Iterator[Path]:
    return itertools.takewhile(Path.exists, (_part(archive, number) for number in itertools.count()))


class _Parts(io.RawIOBase):
    """A file that goes on in the next part when one is full."""

    def __init__(self, archive: Path, part_bytes: int) -> None:
        self.written: list[Path] = []
        self._archive, self._most, self._left = archive, part_bytes, 0
        self._file: io.BufferedWriter | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data)
        while view:
            if not self._left:
                self._next()
            assert self._file is not None
            some = view[: self._left]
            self._file.write(some)
            self._left -= len(some)
            view = view[len(some) :]
        return len(data)

    def _next(self) -> None:
        self._end()
        name = _part(self._archive, len(self.written))
        self.written.append(name.with_name(f"{name.name}.new"))
        self._file, self._left = self.written[-1].open("wb"), self._most

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        self._end()
        super().close()


class _Joined(io.RawIOBase):
    """The parts as one file."""

    def __init__(self, parts: list[Path]) -> None:
        self._parts = iter(parts)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        while True:
            if self._file is None:
                path = next(self._parts, None)
                if path is None:
                    return b""
                self._file = path.open("rb")
            if data := self._file.read(size):
                return data
            self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
