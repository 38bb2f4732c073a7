"""The bound beside a layer: its multiplications by hand, and what it follows from."""

from __future__ import annotations

import dataclasses

import pytest
from vectors import machine_named

from autoconv.bench.bound import least_seconds, multiplications
from autoconv.common.candidate import Candidate
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer

LAYER = ConvLayer(N=2, C=6, H=28, W=28, K=10, R=3, S=3, padding=1)
STEM = ConvLayer(N=1, C=3, H=227, W=227, K=96, R=11, S=11, stride=4)
DEPTHWISE = ConvLayer(N=1, C=16, H=32, W=32, K=16, R=31, S=31, padding=15, groups=16)


@pytest.mark.parametrize(
    ("layer", "candidate", "count"),
    [
        (LAYER, "direct[TK=16,TP=1,TQ=6,BC=6,filters=packed]", LAYER.macs),
        (LAYER, "winograd[m=7x7,rows=1,coop=0]", 2 * 4 * 4 * 81 * 6 * 10),
        (LAYER, "winograd[m=4x5,rows=1,coop=1]", 2 * 7 * 6 * 42 * 6 * 10),  # of rows, six tiles: the last is cut
        (STEM, "winograd[m=5x7,rows=1,coop=0]", 11 * 8 * (5 + 2) * (7 + 2) * 16 * 3 * 96),  # 16 subfilters of 3x3
        (LAYER, "numpy.winograd[m=2]", None),
        (LAYER, "winograd.matrix[m=7x7,rows=1,coop=0]", 2 * 4 * 4 * 81 * 6 * 10),
        (LAYER, "fft.matrix[tile=16x16,rows=1,coop=0]", 2 * 2 * 2 * 3 * (16 * 16 // 2 + 2) * 6 * 10),
        (LAYER, "matrix[products=6,strip=128,BC=6]", LAYER.macs),
        (LAYER, "matrix.x3[products=3,strip=128,BC=6]", LAYER.macs),
        (DEPTHWISE, "fft[tile=64x64,rows=1,coop=0]", 3 * (64 * 64 // 2 + 2) * 16),
    ],
)
def test_multiplications_are_those_of_the_tiles(layer: ConvLayer, candidate: str, count: int | None) -> None:
    assert multiplications(layer, CPU.current(), Candidate.parse(candidate)) == count


def test_the_bound_is_computing_or_reading() -> None:
    device, direct = CPU.current(), Candidate.parse("direct[TK=16,TP=1,TQ=6,BC=6,filters=packed]")
    computing = ConvLayer(N=1, C=64, H=28, W=28, K=64, R=3, S=3, padding=1)
    assert least_seconds(computing, device, direct) == pytest.approx(computing.flops / device.peak_flops("float32"))
    reading = ConvLayer(N=1, C=1, H=512, W=512, K=1, R=1, S=1)
    expected = device.machine.reading(reading.bytes, reading.bytes / device.threads)
    assert least_seconds(reading, device, direct) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("candidate", "products"),
    [
        ("matrix[products=6,strip=128,BC=64]", 6),
        ("matrix.x3[products=3,strip=128,BC=64]", 3),
        ("winograd.matrix[m=4x4,rows=1,coop=0]", 6),
        ("winograd.matrix.x3[m=4x4,rows=1,coop=0]", 3),
        ("winograd[m=4x4,rows=1,coop=0]", None),
    ],
)
def test_the_bound_takes_the_peak_of_the_unit_that_multiplies(candidate: str, products: int | None) -> None:
    machine = machine_named("xeon-avx512")
    peaks = {**machine.peaks, "amx": {"bfloat16": 4e12}}
    model = dataclasses.replace(machine, peaks=peaks).text
    device, parsed = CPU(2, "avx512", matrix_unit="amx", model=model), Candidate.parse(candidate)
    layer = ConvLayer(N=8, C=64, H=28, W=28, K=64, R=3, S=3, padding=1)
    peak = 4e12 / products if products else machine.peaks["avx512"]["float32"]
    multiplied = multiplications(layer, device, parsed)
    assert multiplied is not None
    assert least_seconds(layer, device, parsed) == pytest.approx(2 * multiplied / peak)
