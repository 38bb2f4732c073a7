"""NVRTC, and that cubins are kept; occupancy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoconv.common import machine_code
from autoconv.cuda.codegen import compiler
from autoconv.cuda.codegen.compiler import CompileError, architecture, compiled
from autoconv.cuda.codegen.occupancy import blocks_per_multiprocessor, limits_of, register_cap


class Counting:
    """A compiler that makes something out of anything, and counts."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []

    def architectures(self) -> tuple[int, ...]:
        return 75, 80, 86, 89, 90

    def compile(self, text: str, target: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
        self.compiled.append((text, target))
        return f"{target}:{text}".encode(), ""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    fake = Counting()
    monkeypatch.setattr(compiler, "nvrtc", lambda: fake)
    monkeypatch.setenv("AUTOCONV_KERNEL_DIR", str(tmp_path))
    return fake


def test_a_text_is_compiled_once_for_each_architecture_and_compiler(counting: Counting) -> None:
    assert compiled("a", 80) == compiled("a", 80) == b"sm_80:a"
    compiled("a", 90)
    compiled("b", 80)
    assert counting.compiled == [("a", "sm_80"), ("a", "sm_90a"), ("b", "sm_80")]
    counting.version = (13, 1)
    compiled("a", 80)
    assert len(counting.compiled) == 4


def test_a_cubin_that_was_tampered_with_is_compiled_again(counting: Counting) -> None:
    compiled("a", 80)
    (file,) = machine_code.folder().iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert compiled("a", 80) == b"sm_80:a"
    assert len(counting.compiled) == 2


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


def test_a_gpu_newer_than_the_compiler_gets_what_runs_on_it(counting: Counting) -> None:
    """NVRTC refuses an architecture that it does not know, as 12.6 does sm_120."""
    for capability in (90, 87, 99, 120):
        compiler.compiled("text", capability)
    assert [target for _, target in counting.compiled] == ["sm_90a", "sm_86", "sm_90", "compute_90"]


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
