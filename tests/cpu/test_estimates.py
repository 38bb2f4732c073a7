"""Candidates and estimates are functions of the layer and of the machine model, and they rank what was measured."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vectors import INSTRUCTION_SETS, MACHINES, machine_named

import autoconv
from autoconv import registry
from autoconv.algorithm import Algorithm, Candidate
from autoconv.cpu import permission, threads
from autoconv.cpu.device import CPU
from autoconv.cpu.machine.checks import CURVES
from autoconv.cpu.machine.curve import Curve
from autoconv.cpu.machine.model import Machine
from autoconv.layer import ConvLayer

TESTS = Path(__file__).parents[1]
FAMILIES: tuple[Algorithm[Any], ...] = tuple(a for a in registry.algorithms(CPU.current()) if a.vendor is None)
LAYERS = {
    "3x3": ConvLayer(N=1, C=128, H=28, W=28, K=128, R=3, S=3, padding=1),
    "3x3 dgrad": ConvLayer(N=2, C=32, H=28, W=28, K=64, R=3, S=3, padding=1, stride=2, direction="dgrad"),
    "3x3 wgrad": ConvLayer(N=2, C=64, H=28, W=28, K=64, R=3, S=3, padding=1, direction="wgrad"),
    "1x1": ConvLayer(N=2, C=256, H=14, W=14, K=512, R=1, S=1),
    "large": ConvLayer(N=1, C=16, H=56, W=56, K=32, R=9, S=9, padding=4),
    "depthwise": ConvLayer(N=1, C=64, H=56, W=56, K=64, R=3, S=3, padding=1, groups=64),
    "depthwise wgrad": ConvLayer(
        N=2, C=64, H=56, W=56, K=64, R=3, S=3, padding=1, stride=2, groups=64, direction="wgrad"
    ),
    "NHWC": ConvLayer(N=2, C=64, H=28, W=28, K=64, R=3, S=3, padding=1, layout="NHWC"),
    "bytes": ConvLayer(N=2, C=64, H=28, W=28, K=64, R=3, S=3, padding=1, layout="NHWC", dtype="uint8"),
}


@pytest.fixture(autouse=True)
def permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are, to estimate what they take: none is used."""
    monkeypatch.setattr(permission, "granted", lambda: True)


def device_of(machine: Machine) -> CPU:
    """A processor with the one instruction set, and the matrix unit, that a model knows."""
    (instruction_set,) = machine.peaks.keys() & set(INSTRUCTION_SETS)
    unit = "amx" if "amx" in machine.peaks else None
    return CPU(machine.threads, instruction_set, matrix_unit=unit, model=machine.text)


def estimates(layer: ConvLayer, device: CPU, every: int = 1) -> dict[Candidate, float]:
    """Of every candidate, or of one in so many of each family."""
    return {
        candidate: family.estimate(layer, device, candidate.params)
        for family in FAMILIES
        if not family.unsupported(layer)
        for candidate in family.all(layer, device)[::every]
        if not family.refusals(layer, device, candidate.params)
    }


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_else_is_asked_of_the_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(machine_named(name))
    found = {layer: estimates(layer, device, 16) for layer in LAYERS.values()}
    assert all(0 < seconds < 1e6 for each in found.values() for seconds in each.values())

    def refuse(*args: object) -> None:
        raise AssertionError("asked of the processor that the tests run on")

    for what in ("facts", "key", "name"):
        monkeypatch.setattr(CPU, what, property(refuse))
    monkeypatch.setattr("autoconv.cpu.device.machine_in_force", refuse)
    monkeypatch.setattr(threads, "count_threads", refuse)
    other = dataclasses.replace(machine_named(name), when="measured anew")  # no memory of the first time helps
    assert {layer: estimates(layer, device_of(other), 16) for layer in LAYERS.values()} == found


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_on_a_machine_twice_as_fast_everything_takes_half_the_time(layer: ConvLayer) -> None:
    """So there are no seconds in them but those of the model."""
    slow = machine_named("epyc-zen3")

    def doubled(curve: Curve | None) -> Curve | None:
        return curve and Curve(tuple((size, 2 * rate) for size, rate in curve.points))

    fast = dataclasses.replace(
        slow,
        peaks={unit: {dtype: 2 * rate for dtype, rate in types.items()} for unit, types in slow.peaks.items()},
        **{name: doubled(getattr(slow, name)) for name in CURVES},
        **{name: getattr(slow, name) / 2 for name in ("call", "barrier", "wake")},
        transform=2 * (slow.transform or 0),
    )
    assert estimates(layer, device_of(fast), 4) == pytest.approx(
        {candidate: seconds / 2 for candidate, seconds in estimates(layer, device_of(slow), 4).items()}
    )


def test_a_matrix_unit_is_estimated_where_a_model_has_one() -> None:
    """Products of bfloat16 take a small part there of what they take on vectors."""
    layer = LAYERS["3x3"].replace(dtype="bfloat16")
    found = estimates(layer, device_of(machine_named("xeon-amx")))
    best = min(found, key=found.__getitem__)
    assert best.algorithm == "matrix"
    assert found[best] < 0.7 * min(
        seconds for candidate, seconds in found.items() if "matrix" not in candidate.algorithm
    )
    assert not any(
        "matrix" in candidate.algorithm for candidate in estimates(LAYERS["3x3"], device_of(machine_named("epyc-zen5")))
    )


def test_machines_that_differ_want_other_candidates() -> None:
    found = {name: estimates(LAYERS["3x3"], device_of(machine_named(name))) for name in MACHINES}
    picks = {name: min(each, key=each.__getitem__) for name, each in found.items()}
    assert picks["synthetic-starved"] != picks["synthetic-fed"]
    assert found["synthetic-starved"].keys() != found["synthetic-fed"].keys()  # blocks of what their caches hold


@functools.cache
def grid() -> list[dict[str, Any]]:
    """The facts of `tests/data`."""
    text = gzip.decompress((TESTS / "data" / "grids.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("name", "typical", "worst", "four", "worst_of_four"),
    [
        ("epyc-zen3", 1.07, 1.4, 1.02, 1.35),
        ("xeon-avx512", 1.07, 1.4, 1.03, 1.2),
        ("xeon-emerald", 1.2, 1.8, 1.07, 1.35),
        ("epyc-zen5", 1.17, 1.9, 1.06, 1.25),
    ],
)
def test_the_least_estimate_is_near_the_quickest(
    name: str, typical: float, worst: float, four: float, worst_of_four: float
) -> None:
    device = device_of(machine_named(name))
    families = {family.name: family for family in FAMILIES}
    first, best_of_four = [], []
    for entry in grid():
        if entry["machine"] != name:
            continue
        layer = ConvLayer.parse(entry["layer"])
        ranked = []
        for text, cold in entry["cold_us"].items():
            candidate = Candidate.parse(text)
            family = families[candidate.algorithm]
            if not family.refusals(layer, device, candidate.params):
                ranked.append((family.estimate(layer, device, candidate.params), text, cold))
        times = [cold for *_, cold in sorted(ranked)]
        first.append(times[0] / min(times))
        best_of_four.append(min(times[:4]) / min(times))
    assert len(first) == 27
    typically: Callable[[list[float]], float] = lambda ratios: math.prod(ratios) ** (1 / len(ratios))  # noqa: E731
    assert typically(first) < typical
    assert max(first) < worst
    assert typically(best_of_four) < four
    assert max(best_of_four) < worst_of_four


def test_no_source_names_a_processor() -> None:
    """What differs between them is measured."""
    named = re.compile(
        r"\b(AMD|AuthenticAMD|GenuineIntel|Zen ?\d?|Xeon|EPYC|Ryzen|Skylake|Haswell|Broadwell|Cascade Lake|Ice Lake"
        r"|Sapphire Rapids|Granite Rapids|znver\d)\b"
    )
    package = Path(autoconv.__file__).parent
    rooms = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "cuda"]
    found = {path.relative_to(package).as_posix() for path in rooms if named.search(path.read_text(encoding="utf-8"))}
    assert not found
