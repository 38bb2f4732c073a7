"""No instruction of a matrix unit where it is an illegal one: without permission, or on a thread without tiles."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from forked import exit_code, forks
from layers import operands
from vectors import modelled

from autoconv import ConvLayer, TuningCache, plan, registry
from autoconv.algorithm import Algorithm
from autoconv.cpu import permission, pool
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import Module
from autoconv.cpu.codegen.launch import RUN, TASK, launch
from autoconv.cpu.common.tiles.algorithm import TileAlgorithm
from autoconv.cpu.device import CPU, host_instruction_set, host_level
from autoconv.cpu.int8.algorithm import Int8
from autoconv.errors import PlanError
from autoconv.tuning import reference

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
AMX = CPU(2, "avx512", matrix_unit="amx", model=modelled("avx512", 2).text)
LAYER = ConvLayer(N=1, C=33, H=7, W=8, K=35, R=3, S=3, padding=1)
FAMILIES = [  # those that take a layer of float32
    family for family in registry.algorithms(AMX) if isinstance(family, TileAlgorithm) and "float32" in family.dtypes
]
OPERATION = re.compile(r"@llvm\.x86\.(tile(?:zero|loadd64|stored64)|tdp\w+)")


def layer_for(family: Algorithm[Any]) -> ConvLayer:
    single = {"R": 1, "S": 1, "padding": 0} if "pointwise" in family.name else {}
    return LAYER.replace(direction=family.directions[0], **single)


def unconfigured(module: Module) -> list[str]:
    """Functions that a thread may come to without tiles, and that use some, themselves or by others that they call.

    In a function that configures tiles it does so before anything branches, and releases them after all has met again.
    """
    lines = {f.name: str(f).splitlines()[1:] for f in module.functions}
    configuring = {name for name, body in lines.items() if any("ldtilecfg" in line for line in body)}
    texts = "\n".join(line for body in lines.values() for line in body)
    entered = set(re.findall(r"@(\w+)\b(?!\()", texts)) | {f.name for f in module.functions if f.exported}
    needing: set[str] = set()

    def uses(line: str) -> bool:
        return bool(OPERATION.search(line)) or any(n in needing for n in re.findall(r"call void @(\w+)\(", line))

    while more := {n for n, body in lines.items() if any(map(uses, body))} - configuring - needing:
        needing |= more
    wrong = list(needing & entered)
    for name, body in lines.items():
        starts, ends = ([n for n, x in enumerate(body) if word in x] for word in ("ldtilecfg", "tilerelease"))
        if starts or ends:
            users = [n for n, line in enumerate(body) if uses(line)]
            around = len(starts) == len(ends) == 1 and starts[0] < min(users) and max(users) < ends[0]
            labels = [n for n, line in enumerate(body) if n and line.endswith(":")]
            if not around or any(n < starts[0] or n > ends[0] for n in labels):
                wrong.append(name)
    return sorted(wrong)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_thread_configures_the_tiles_that_it_uses(family: TileAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[Module] = []
    monkeypatch.setattr(compiler, "build", lambda emit, *arguments: modules.append(emit(*arguments)))
    layer = layer_for(family)
    family.program(layer, AMX, family.all(layer, AMX)[0].params)
    (module,) = modules
    assert OPERATION.search(str(module))
    assert unconfigured(module) == []


def test_every_thread_configures_the_tiles_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[Module] = []
    monkeypatch.setattr(compiler, "build", lambda emit, *arguments: modules.append(emit(*arguments)))
    Int8().program(LAYER.replace(dtype="uint8"), AMX, {"product": "tdpbusd", "NV": 2, "TP": 1, "strip": 64})
    (module,) = modules
    assert "llvm.x86.tdpbusd" in str(module)
    assert unconfigured(module) == []


def test_a_task_without_configuration_is_found() -> None:
    def module(configure: str) -> Module:
        m = Module("avx512", matrix_unit="amx")
        product = m.function("product", internal=True)
        product.tile_zero(0)
        task, run = m.function("task", *TASK, internal=True), m.function("run", *RUN)
        for step in configure.split():
            if step == "product":
                task.call(product)
            elif step == "configure":
                task.configure_tiles()
            else:
                task.release_tiles()
        launch(run, run.args[0], task, 1)
        return m

    assert unconfigured(module("configure product release")) == []
    for wrong in ("product", "configure release product", "product configure release", "configure product"):
        assert unconfigured(module(wrong)) == ["task"], wrong


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's refusal, also where it would allow tiles."""
    monkeypatch.setattr(permission, "granted", lambda: False)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_device_with_tiles_in_a_process_without_permission(family: TileAlgorithm) -> None:
    """Such as that of a plan which another process pickled: the reason, and no instruction."""
    layer = layer_for(family)
    params = family.all(layer, AMX)[0].params
    assert family.why_not(layer, AMX, params) == permission.refused() != []
    with pytest.raises(PlanError, match="matrix_unit='amx': expected a process that may use tiles"):
        family.build(layer, AMX, params)


@pytest.mark.usefixtures("refused")
def test_quantised_layers_are_computed_by_vectors_without_permission() -> None:
    layer = LAYER.replace(dtype="uint8")
    family = Int8()
    named = family.all(layer, AMX)
    assert named
    assert all(candidate.params["product"] != "tdpbusd" for candidate in named)
    (reason,) = family.why_not(layer, AMX, named[0].params | {"product": "tdpbusd", "NV": 2, "TP": 1})
    assert "product=tdpbusd" in reason


@pytest.mark.usefixtures("refused")
def test_without_permission_plans_are_made_of_the_rest(tmp_path: Any) -> None:
    cache = TuningCache(tmp_path, system=None)
    made = plan(LAYER, "heuristic", device=AMX, cache=cache)
    assert not any("matrix" in name for name in made.ranking)
    x, w, *_ = operands(LAYER)
    want, magnitude = reference.convolve(LAYER, x, w), reference.magnitude(LAYER, x, w)
    assert reference.error(made.run(x, w), want, magnitude) < 3e-5
    with pytest.raises(PlanError, match="expected a process that may use tiles"):
        plan(LAYER, "matrix", device=AMX, cache=cache)
    cache.close()


def test_what_the_system_answered_first_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once: who was refused stays without tiles, and kernels that use them never meet a later refusal."""
    monkeypatch.setattr(permission.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(permission.sys, "platform", "linux")
    for first in (0, -1):
        syscall = Mock(side_effect=[first, -1 - first])
        monkeypatch.setattr(permission.ctypes, "CDLL", lambda _, syscall=syscall: SimpleNamespace(syscall=syscall))
        monkeypatch.setattr(permission, "granted", functools.cache(permission.granted.__wrapped__))
        assert [permission.granted() for _ in range(3)] == [first == 0] * 3
        assert syscall.call_count == 1


def test_a_permission_that_is_lost_between_listing_and_running(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for what another process had listed: a line where tiles are asked for by name, else the other algorithms."""
    monkeypatch.setattr(permission, "granted", lambda: True)
    family = next(family for family in FAMILIES if family.name == "matrix")
    (listed, *_) = family.all(LAYER, AMX)
    assert family.why_not(LAYER, AMX, listed.params) == []
    monkeypatch.setattr(permission, "granted", lambda: False)
    with pytest.raises(PlanError, match="matrix_unit='amx': expected a process that may use tiles"):
        family.build(LAYER, AMX, listed.params)
    with pytest.raises(PlanError, match="expected a process that may use tiles"):
        Int8().build(LAYER.replace(dtype="uint8"), AMX, {"product": "tdpbusd", "NV": 2, "TP": 1, "strip": 64})
    cache = TuningCache(tmp_path, system=None)
    made, (x, w, *_) = plan(LAYER, "heuristic", device=AMX, cache=cache), operands(LAYER)
    want, magnitude = reference.convolve(LAYER, x, w), reference.magnitude(LAYER, x, w)
    assert reference.error(made.run(x, w), want, magnitude) < 3e-5
    cache.close()


SMALL_STACK = """
import ctypes, dataclasses, signal, sys
import numpy as np

class Stack(ctypes.Structure):
    _fields_ = [("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(8192)  # Linux wants 11952 for a thread that uses tiles
libc = ctypes.CDLL(None, use_errno=True)
small = libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, len(room))), None) == 0
calls = []
signal.signal(signal.SIGALRM, lambda *_: calls.append(None))  # Python's handlers run on that stack

from autoconv import ConvLayer, plan
from autoconv.cpu.device import CPU, host_instruction_set, host_level

layer = ConvLayer(N=1, C=33, H=7, W=8, K=35, R=3, S=3, padding=1)
rng = np.random.default_rng(0)
x, w = (rng.standard_normal(shape).astype(np.float32) for shape in layer.input_shapes)
exact = plan(layer, "numpy.direct").run(x, w)
devices = [dataclasses.replace(CPU.current(2), model=sys.argv[1])]
devices.append(CPU(2, "avx2", matrix_unit="emulated", model=sys.argv[2]))
exact = plan(layer, "numpy.direct", device=devices[0]).run(x, w)
plans = [plan(layer, name, device=device) for name, device in zip(("heuristic", "matrix"), devices)]
wanted = [made.run(x, w) for made in plans]
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
rounds = 0
while len(calls) < 50:
    rounds += 1
    for made, want in zip(plans, wanted):
        assert np.array_equal(made.run(x, w), want)
signal.setitimer(signal.ITIMER_REAL, 0)
assert all(np.abs(want - exact).max() < 1e-3 for want in wanted)
assert not (small and host_level() == "amx"), "tiles, where a handler has no room for them"
print(len(calls) >= 50 and rounds > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_handlers_of_signals_on_a_small_stack() -> None:
    """While kernels run: the same bits, and nobody is killed. With tiles at hand, permission is not given then."""
    environment = {name: value for name, value in os.environ.items() if name != "AUTOCONV_ISA"}
    models = [modelled(vectors, 2).text for vectors in (host_instruction_set(), "avx2")]
    command = [sys.executable, "-c", SMALL_STACK, *models]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout.strip()) == (0, "True"), ended.stderr


@forks
def test_a_new_thread_and_a_forked_child_compute_with_tiles(tmp_path: Any) -> None:
    """Of this processor where it has them, else emulated: the same bits as here."""
    emulated = CPU(2, "avx2", matrix_unit="emulated", model=modelled("avx2", 2).text)
    device = CPU.current(2) if host_level() == "amx" else emulated
    cache = TuningCache(tmp_path, system=None)
    made = plan(LAYER, "matrix", device=device, cache=cache)
    x, w, *_ = operands(LAYER)
    want, found = made.run(x, w), []
    thread = threading.Thread(target=lambda: found.append(made.run(x, w)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], want)
    assert exit_code(lambda: int(np.array_equal(made.run(x, w), want))) == 1
    cache.close()
