"""The folder of a run on a GPU, carried from machine to machine as an archive."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_gpus import Narrow
from simt.emulator import MISSING

from autoconv.bench import gpu as bench
from autoconv.bench.gpu import RESULTS, read
from autoconv.bench.gpu.archive import ArchiveError, pack, unpack
from autoconv.cli import main, options
from autoconv.device import Device

pytestmark = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


def test_an_archive_carries_the_folder_in_parts(tmp_path: Path) -> None:
    folder, archive = tmp_path / "results", tmp_path / "away" / "state.tgz"
    (folder / "kernels").mkdir(parents=True)
    noise = np.random.default_rng(0).bytes(100_000)
    (folder / "kernels" / "one").write_bytes(noise)
    (folder / RESULTS).write_text('{"item": "warm"}\n')
    parts = pack(folder, archive, 40_000)
    assert [(path.name, path.stat().st_size <= 40_000) for path in parts] == [
        (f"state.tgz.00{number}", True) for number in range(3)
    ]
    assert unpack(archive, tmp_path / "there")
    assert (tmp_path / "there" / "kernels" / "one").read_bytes() == noise
    assert read(tmp_path / "there") == [{"item": "warm"}]
    for damage in (parts[2].unlink, lambda: parts[1].write_bytes(b"\0" * 40_000)):
        damage()
        with pytest.raises(ArchiveError, match=r"expected a whole archive in state\.tgz\.000 to"):
            unpack(archive, tmp_path / "elsewhere")
        assert not list((tmp_path / "elsewhere").iterdir())
    (folder / "kernels" / "one").unlink()
    assert pack(folder, archive, 40_000) == parts[:1]
    assert [path.name for path in sorted(archive.parent.iterdir())] == ["state.tgz.000"]
    assert not unpack(tmp_path / "none", tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "kind"), [("../out", tarfile.REGTYPE), ("/out", tarfile.REGTYPE), ("a", tarfile.SYMTYPE)]
)
def test_nothing_is_written_outside_of_the_folder(name: str, kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "state.tgz.000", "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/out"
        tar.addfile(member, io.BytesIO())
    with pytest.raises(ArchiveError, match=f"expected files and folders below one, got '{name}'"):
        unpack(tmp_path / "state.tgz", tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_the_command_carries_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[list[str]] = []

    def run(device: Device, folder: Path, *_: Any, **__: Any) -> Any:
        folder.mkdir(exist_ok=True)
        done.append([result["item"] for result in read(folder)])
        with (folder / RESULTS).open("a") as file:
            file.write('{"item": "warm"}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(options, "resolve", lambda name: Narrow(capability=80))
    command = ["bench", "alexnet", "--device", "cuda", "--archive", str(tmp_path / "state.tgz"), "--part", "1", "-o"]
    for machine in ("first", "second"):
        assert main([*command, str(tmp_path / machine)]) == 130
    assert done == [[], ["warm"]]
    assert main([*command, str(tmp_path)]) == 2
    assert "expected a place outside of" in capsys.readouterr().err
