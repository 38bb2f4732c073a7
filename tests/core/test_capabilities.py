"""What every family declares that it can do is what it does: over the whole grid, and both ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from guards import run_guarded
from layers import operands
from simt.cases import check
from simt.emulator import MISSING, Emulated

from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.tuning import reference

# not the device at hand: what is declared is the same on every machine
DEVICES: dict[str, Device] = {
    "cpu": CPU(threads=2, instruction_set="avx512", matrix_unit="emulated"),
    "cuda": Emulated(capability=90),
}
FAMILIES = [  # those of integers have tests of their own
    (kind, a)
    for kind, device in DEVICES.items()
    for a in registry.algorithms(device)
    if a.vendor is None and set(a.dtypes) & set(DTYPES)
]
CHANNELS = {"dense": (16, 18, 32, 4), "grouped": (16, 256), "depthwise": (16,)}
DILATIONS = (1, 2)
FILTERS = (3, 1, 5, 11)  # each family has filters it is for; one that it takes is enough
STRIDES = (1, 2)

Cell = tuple[str, str, str, str, int]
CELLS: list[Cell] = list(itertools.product(DIRECTIONS, DTYPES, LAYOUTS, CHANNELS, DILATIONS))


def layers_of(cell: Cell, **epilogue: Any) -> Iterator[ConvLayer]:
    direction, dtype, layout, grouping, dilation = cell
    # a dilation means nothing to a filter of 1x1, and families of such filters take it
    for channels, size, stride in itertools.product(CHANNELS[grouping], FILTERS, STRIDES):
        groups = {"dense": 1, "grouped": 2, "depthwise": channels}[grouping]
        yield ConvLayer(
            N=2, C=channels, H=24, W=25, K=channels, R=size, S=size, stride=stride, padding=size // 2, groups=groups,
            dilation=dilation, direction=direction, dtype=dtype, layout=layout, **epilogue,
        )  # fmt: skip


def declared(family: Algorithm[Any], cell: Cell) -> bool:
    direction, dtype, layout, grouping, dilation = cell
    return (
        direction in family.directions
        and dtype in family.dtypes
        and layout in family.layouts
        and grouping in family.groupings
        and (dilation == 1 or family.dilated)
    )


def runnable(kind: str, family: Algorithm[Any], cell: Cell, **epilogue: Any) -> Iterator[tuple[ConvLayer, Candidate]]:
    """One after the other, as a grid takes long to list whole, and the first of them is often enough."""
    for layer in layers_of(cell, **epilogue):
        for params in () if family.unsupported(layer) else family.candidates(layer, DEVICES[kind]):
            if not family.why_not(layer, DEVICES[kind], params):
                yield layer, Candidate(family.name, tuple(params.items()))


def text(cell: Cell) -> str:
    direction, dtype, layout, groups, dilation = cell
    return f"{direction} {dtype} {layout} {groups}{' dilated' if dilation > 1 else ''}"


@pytest.mark.parametrize(("kind", "family"), FAMILIES, ids=lambda value: getattr(value, "name", value))
def test_what_is_declared_runs(kind: str, family: Algorithm[Any]) -> None:
    cells = [cell for cell in CELLS if declared(family, cell)]
    assert cells
    assert [text(cell) for cell in cells if next(runnable(kind, family, cell), None) is None] == []
    for direction in set(family.epilogue) & set(family.directions):
        cell = next(cell for cell in cells if cell[0] == direction)
        assert next(runnable(kind, family, cell, bias=True, residual=True, activation="relu"), None) is not None


@pytest.mark.parametrize(("kind", "family"), FAMILIES, ids=lambda value: getattr(value, "name", value))
def test_what_is_not_declared_is_refused_with_a_reason(kind: str, family: Algorithm[Any]) -> None:
    for cell in CELLS:
        if not declared(family, cell):
            for layer in (layer for layer in layers_of(cell) if layer.C > 1):  # a single channel is dense and depthwise
                reasons = family.why_not(layer, DEVICES[kind], {})
                assert reasons, text(cell)
                assert all("expected" in reason and "got" in reason for reason in reasons)


GENERATED = [family for kind, family in FAMILIES if kind == "cpu" and not family.name.startswith("numpy.")]
ON_CUDA = {family.name: family for kind, family in FAMILIES if kind == "cuda"}
TAKEN = [(name, cell) for name, family in ON_CUDA.items() for cell in CELLS if declared(family, cell)]


@pytest.mark.parametrize("cell", CELLS, ids=text)
def test_a_generated_kernel_runs_every_kind_of_layer(cell: Cell) -> None:
    """The first family that takes it gives the right answer; so nothing is left to NumPy alone."""
    device = CPU.current()
    family, layer, candidate = next(
        (family, layer, candidate)
        for family in GENERATED
        for layer in layers_of(cell)
        for candidate in family.all(layer, device)
        if not family.why_not(layer, device, candidate.params)
    )
    a, b, _, _ = operands(layer)
    out = run_guarded(family, layer, device, candidate, (a, b, None, None), "after")
    error = reference.error(out, reference.convolve(layer, a, b), reference.magnitude(layer, a, b))
    assert error <= family.bound(layer, candidate.params)


def test_on_cuda_direct_and_gemm_take_every_kind_of_layer() -> None:
    assert all(declared(ON_CUDA[name], cell) for cell in CELLS for name in ("direct", "gemm"))


def test_on_cuda_tensor_cores_take_every_direction_in_nhwc() -> None:
    for cell in CELLS:
        _, dtype, layout, groups, _ = cell
        if layout == "NHWC" and groups != "depthwise" and dtype != "float64":
            assert declared(ON_CUDA["gemm.tensor.tf32" if dtype == "float32" else "gemm.tensor"], cell)


def runs(name: str, cell: Cell) -> None:
    layer, candidate = next(runnable("cuda", ON_CUDA[name], cell))
    check(Emulated(capability=90), ON_CUDA[name], layer, candidate.params)


@pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
@pytest.mark.parametrize(("name", "cell"), [t for t in TAKEN if t[0] in ("direct", "gemm")][::23], ids=str)
def test_a_sample_of_what_is_declared_on_cuda_runs(name: str, cell: Cell) -> None:
    runs(name, cell)


@pytest.mark.stress
@pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
@pytest.mark.parametrize(("name", "cell"), TAKEN, ids=str)
def test_all_that_is_declared_on_cuda_runs(name: str, cell: Cell) -> None:
    runs(name, cell)
