"""The table of contents of the CPU's algorithms is complete, and its entries keep the contract's promises."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from dataclasses import replace

import numpy as np
import pytest
from guards import run_guarded, some
from layers import edge, edges, everyday, operands

import autoconv.cpu
from autoconv.algorithm import Algorithm, Candidate
from autoconv.common.types import INTEGERS
from autoconv.cpu.device import CPU
from autoconv.cpu.pool import Entry
from autoconv.layer import DIRECTIONS, DTYPES
from autoconv.registry import algorithms
from autoconv.tuning.reference import convolve

DEVICE = replace(CPU.current(), matrix_unit="emulated")  # so that every family has something to run
OF_FLOATS = [a for a in algorithms(DEVICE) if a.vendor is None and not set(a.dtypes) & set(INTEGERS)]
DEEP = {"C": 32, "K": 32}  # channels for families that want sums of some length
DEEPENED = ("pointwise", "strided")
WHOLE = ("gemm.strassen",)  # sums of parts, which are whole numbers as well


def test_every_algorithm_is_in_the_table() -> None:
    """Walks the folder: a file that defines an algorithm and is not registered fails here."""
    registered = {type(algorithm) for algorithm in algorithms(DEVICE)}
    for module in pkgutil.walk_packages(autoconv.cpu.__path__, "autoconv.cpu."):
        for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(found, Algorithm) and not inspect.isabstract(found):
                assert found in registered, f"{module.name}: {found.__name__} is not in ALGORITHMS"


def test_names_are_unique() -> None:
    names = [algorithm.name for algorithm in algorithms(DEVICE)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "algorithm", [a for a in algorithms(DEVICE) if not set(a.dtypes) & set(INTEGERS)], ids=lambda a: a.name
)
def test_contract(algorithm: Algorithm) -> None:
    """Versions are text, candidates print and parse and repeat, memory is as the kernel says, time is positive.

    Families of integers have a test of their own.
    """
    assert isinstance(algorithm.version, str)
    assert algorithm.version
    built = 0
    for direction in DIRECTIONS:
        kind = {"direction": direction, "dtype": algorithm.dtypes[0]}
        deep = (edge(name, **DEEP, **kind) for name in DEEPENED)
        for layer in (*edges(**kind).values(), *deep):
            candidates = algorithm.all(layer, DEVICE)
            assert candidates == algorithm.all(layer, DEVICE)
            assert len(set(candidates)) == len(candidates)
            assert all(Candidate.parse(str(candidate)) == candidate for candidate in candidates)
            able = [c for c in some(candidates, 8) if not algorithm.why_not(layer, DEVICE, c.params)]
            for candidate in everyday(algorithm, layer, able):
                params = candidate.params
                kernel = algorithm.build(layer, DEVICE, params)
                assert kernel.workspace_bytes == algorithm.workspace_bytes(layer, DEVICE, params)
                assert kernel.packed_bytes == algorithm.packed_bytes(layer, DEVICE, params)
                assert kernel.packed_bytes == 0 or direction != "wgrad"
                assert algorithm.estimate(layer, DEVICE, params) > 0
                assert 0 < algorithm.bound(layer, params) < 1e-2
                built += 1
    assert built or not algorithm.installed(), "no layer for it"


@pytest.mark.parametrize("algorithm", [a for a in OF_FLOATS if "float32" in a.dtypes], ids=lambda a: a.name)
def test_exact_algorithms_alone_sum_whole_numbers_without_error(algorithm: Algorithm) -> None:
    rng = np.random.default_rng(0)
    errs = set()
    for name in (
        "plain",
        "pointwise",
        "pointwise strided",
        "depthwise",
        "strided",
        "depthwise strided",
        "large filter",
    ):
        for direction, fields in itertools.product(DIRECTIONS, ({}, DEEP if name in DEEPENED else {})):
            layer = edge(name, direction=direction, **fields)
            arrays = tuple(rng.integers(-400, 400, shape).astype("f") for shape in layer.input_shapes)
            offered = some(algorithm.all(layer, DEVICE), 8)
            able = [c for c in offered if not algorithm.why_not(layer, DEVICE, c.params)]
            for candidate in everyday(algorithm, layer, able) if algorithm.exact else able:
                if True not in errs:  # one that errs is enough
                    out = run_guarded(algorithm, layer, DEVICE, candidate, (*arrays, None, None), "after")
                    errs.add(bool((out != convolve(layer, *arrays)).any()))
    assert errs, "no layer for it"
    assert (algorithm.exact or algorithm.name in WHOLE) == (True not in errs)


@pytest.mark.parametrize("algorithm", OF_FLOATS, ids=lambda a: a.name)
def test_says_whose_threads_it_runs_on(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a race lets the threads of one pool fall asleep before it times what runs on another's."""
    launched = []
    launch = Entry.__call__
    monkeypatch.setattr(Entry, "__call__", lambda *arguments: launched.append(launch(*arguments)))
    kinds = [{"direction": way, "dtype": algorithm.dtypes[0]} for way in DIRECTIONS]
    shapes = (
        x for kind in kinds for x in (*edges(**kind).values(), *(edge(name, **DEEP, **kind) for name in DEEPENED))
    )
    offered = ((x, c) for x in shapes for c in algorithm.all(x, DEVICE))
    layer, candidate = next((x, c) for x, c in offered if not algorithm.why_not(x, DEVICE, c.params))
    run_guarded(algorithm, layer, DEVICE, candidate, operands(layer), "after")
    assert bool(launched) == (algorithm.pool == "autoconv")


def test_what_takes_all_layers_does_so_without_workspace_and_repeatably() -> None:
    takers = [algorithm for algorithm in algorithms(DEVICE) if algorithm.takes_all]
    assert [algorithm.name for algorithm in takers] == ["direct", "numpy.direct", "numpy.int8"]
    assert all(algorithm.deterministic for algorithm in takers)
    kinds = [(a, *kind) for a in takers[:2] for kind in itertools.product(DIRECTIONS, DTYPES)]
    for algorithm, direction, dtype in [*kinds, *((takers[2], "fwd", name) for name in INTEGERS)]:
        for layer in edges(direction=direction, dtype=dtype).values():
            assert any(
                not algorithm.why_not(layer, DEVICE, candidate.params)
                and algorithm.workspace_bytes(layer, DEVICE, candidate.params) == 0
                for candidate in algorithm.all(layer, DEVICE)
            )
