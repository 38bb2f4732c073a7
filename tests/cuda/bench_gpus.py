"""An emulated GPU with few kernels, some of which go wrong, and a run on it that is short."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simt.emulator import Emulated

from autoconv import registry
from autoconv.algorithm import Algorithm, Kernel, Params
from autoconv.bench import gpu as bench
from autoconv.bench.gpu.agenda import Target, items
from autoconv.cuda.codegen.compiler import CompileError
from autoconv.cuda.direct.direct import Direct
from autoconv.device import Device
from autoconv.layer import ConvLayer

LAYER = ConvLayer(N=1, C=2, H=4, W=4, K=2, R=3, S=3, padding=1)
WANTED = [Target("small", (LAYER,))]


class Narrow(Emulated):
    """An emulated GPU with the direct kernels, and, under other names, some that go wrong."""


class Faulty(Direct):
    """Right but for one fault."""

    version = "of this test"  # type: ignore[assignment]  # it is no part of the package

    def __init__(self, fault: str) -> None:
        self.name, self.fault = f"faulty.{fault}", fault  # type: ignore[misc]

    def build(self, layer: ConvLayer, device: Device, params: Params) -> Kernel:
        if self.fault == "dies":
            os._exit(9)
        if self.fault == "compiles":
            raise CompileError("NVRTC 13.0 for sm_80: no")
        kernel = super().build(layer, device, params)
        run = kernel.run

        def wrong(*arguments: Any) -> None:
            run(*arguments)
            arguments[2][...] = 7

        kernel.run = wrong  # type: ignore[method-assign]
        return kernel


def faulty() -> tuple[Algorithm, ...]:
    return tuple(map(Faulty, os.environ.get("FAULTS", "").split()))


@registry.algorithms.register
def _(device: Narrow) -> tuple[Algorithm, ...]:
    return (Direct(), *faulty())


def some(phases: Any, algorithms: Any, wanted: Any) -> list[str]:
    """The items without most of the checks, without the many kinds to warm, and without networks, which want CuPy."""
    found = [i for i in items(phases, algorithms, wanted) if not i.startswith(("warm", "network/", "operator/"))]
    return [i for i in found if not i.startswith("check/") or i.endswith(("/0", "/1"))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[bench.Result], int]]:
    monkeypatch.setattr(bench, "items", some)

    def run(device: Device, folder: Path, phases: tuple[str, ...] = ("check",), budget: float = 1e6) -> Any:
        return bench.run(device, folder, phases, budget, WANTED)

    return run
