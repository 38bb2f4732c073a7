"""NVRTC and the cache of cubins; occupancy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autoconv.cuda.codegen import compiler
from autoconv.cuda.codegen.compiler import CompileError, CubinCache, architecture, compiled
from autoconv.cuda.codegen.occupancy import blocks_per_multiprocessor, limits_of, register_cap

KEY, CUBIN = "0" * 64, b"\x7fELF machine code"


class Counting:
    """A compiler that makes something out of anything, and counts."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []

    def compile(self, text: str, target: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
        self.compiled.append((text, target))
        return f"{target}:{text}".encode(), ""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    fake = Counting()
    monkeypatch.setattr(compiler, "nvrtc", lambda: fake)
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path))
    compiler._cache.cache_clear()
    return fake


def test_a_text_is_compiled_once_for_each_architecture_and_compiler(counting: Counting) -> None:
    assert compiled("a", 80) == compiled("a", 80) == b"sm_80:a"
    compiled("a", 90)
    compiled("b", 80)
    assert counting.compiled == [("a", "sm_80"), ("a", "sm_90a"), ("b", "sm_80")]
    counting.version = (13, 1)
    compiled("a", 80)
    assert len(counting.compiled) == 4


def test_a_cubin_that_was_tampered_with_is_compiled_again(counting: Counting, tmp_path: Path) -> None:
    compiled("a", 80)
    (file,) = (tmp_path / "cubins").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert compiled("a", 80) == b"sm_80:a"
    assert len(counting.compiled) == 2


def test_a_cubin_of_another_kernel_is_not_taken(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.put(KEY, CUBIN)
    other = "1" * 64
    (tmp_path / "cubins" / f"{KEY}.cubin").rename(tmp_path / "cubins" / f"{other}.cubin")
    assert cache.get(other) is None
    assert cache.get(KEY) is None


@pytest.mark.parametrize("content", [b"", b"short", bytes(32), bytes(64)])
def test_a_truncated_file_is_a_miss(tmp_path: Path, content: bytes) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.put(KEY, CUBIN)
    (tmp_path / "cubins" / f"{KEY}.cubin").write_bytes(content)
    assert cache.get(KEY) is None


def test_the_folder_is_private(tmp_path: Path) -> None:
    CubinCache(tmp_path / "cubins").put(KEY, CUBIN)
    assert (tmp_path / "cubins").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cubins"
    CubinCache(folder).put(KEY, CUBIN)
    folder.chmod(0o777)
    cache = CubinCache(folder)
    with pytest.warns(RuntimeWarning, match="only this user can write"):
        assert cache.get(KEY) is None
    cache.put(KEY, CUBIN)  # warned of once, and no error


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cubins").symlink_to(tmp_path / "elsewhere")
    cache = CubinCache(tmp_path / "cubins")
    with pytest.warns(RuntimeWarning, match="not kept"):
        cache.put(KEY, CUBIN)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.put(KEY, CUBIN)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.warns(RuntimeWarning, match="only this user"):
        assert cache.get(KEY) is None


def test_a_place_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "cubins")
    with pytest.warns(RuntimeWarning, match="not kept"):
        cache.put(KEY, CUBIN)
    assert cache.get(KEY) is None


def test_nvrtc_reports_what_it_refuses() -> None:
    nvrtc = needed()
    with pytest.raises(CompileError, match=r"sm_80.*nonsense"):
        nvrtc.compile("__global__ void f() { nonsense; }", "sm_80")
    cubin, _ = nvrtc.compile('extern "C" __global__ void f() {}', "sm_80")
    assert cubin.startswith(b"\x7fELF")
    assert nvrtc.version >= (12, 0)
    assert {75, 80, 90} <= set(nvrtc.architectures())


def needed() -> Any:
    try:
        return compiler.nvrtc()
    except CompileError as error:
        pytest.skip(f"NOT CHECKED: {error}")


def test_without_nvrtc_the_message_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_places", lambda: iter(["/nowhere/libnvrtc.so"]))
    compiler.nvrtc.cache_clear()
    with pytest.raises(CompileError, match=r"nvidia-cuda-nvrtc.*CUDA_PATH"):
        compiler.nvrtc()


def test_architectures_with_instructions_of_their_own() -> None:
    assert [architecture(c) for c in (75, 89, 90, 100, 120)] == ["sm_75", "sm_89", "sm_90a", "sm_100a", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks"),
    [
        (90, 128, 72, 19866, 7),  # by registers, as cuda_occupancy.h says
        (90, 1024, 32, 0, 2),  # by threads
        (90, 32, 16, 0, 32),  # by blocks
        (80, 256, 32, 40 << 10, 4),  # by shared memory, a kilobyte of it reserved to each block
        (75, 256, 32, 32 << 10, 2),  # and none on the oldest
        (80, 128, 32, 164 << 10, 0),  # more than a block may have
        (86, 128, 255, 0, 2),
    ],
)
def test_occupancy(capability: int, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(capability, threads, registers, shared) == blocks


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 192, 256, 512, 1024])
def test_the_register_cap_is_the_largest_that_fits(threads: int) -> None:
    for blocks in range(1, 2048 // threads + 1):
        cap = register_cap(threads, blocks)
        if blocks <= limits_of(90).blocks:
            assert blocks_per_multiprocessor(90, threads, cap, 0) >= blocks
            assert cap == 255 or blocks_per_multiprocessor(90, threads, cap + 8, 0) < blocks
