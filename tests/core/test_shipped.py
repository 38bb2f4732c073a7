"""The records that come along: a winner is of today's version, or whoever asks for it is told that it is not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoconv import registry
from autoconv.algorithm import Candidate
from autoconv.bench.gpu.cases import NOMINAL
from autoconv.bench.gpu.predicted import DatasheetGPU
from autoconv.cpu.device import CPU
from autoconv.cuda.libraries.cublas_cufft import BLAS_WORKSPACE
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits, ranking
from autoconv.records.schema import Record
from autoconv.tuning.choice import choose
from autoconv.tuning.lookup import Request


@dataclass(frozen=True)
class Elsewhere(CPU):
    """The processor that a record is of."""

    recorded: str = ""

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.recorded

    @property
    def lesser_keys(self) -> tuple[str, ...]:
        """None: what this processor's records say is nothing about another one."""
        return ()


@dataclass(frozen=True)
class ElsewhereGPU(DatasheetGPU):
    """The GPU that a record is of, with what there was beside it."""

    recorded: str = ""
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        return dict(self.beside)

    @property
    def key(self) -> str:
        return self.recorded

    def blas(self) -> Any:
        """There, as where the records were made, on Hopper's GPUs."""
        return SimpleNamespace(workspace_bytes=BLAS_WORKSPACE)


def shipped(tmp_path: Path) -> list[Record]:
    return list(TuningCache(tmp_path).records())


def asked(record: Record, cache: TuningCache) -> Request:
    """What is asked on the processor or GPU of the record, with no other library."""
    limits = Limits(vendors=frozenset())
    if record.device.startswith("cuda-"):
        (capability,) = (int(part[2:]) for part in record.device.split("-") if part[:2] == "sm")
        beside = tuple(record.races[-1].versions.items())
        gpu = ElsewhereGPU(capability=capability, recorded=record.device, beside=beside)
        return Request(ConvLayer.parse(record.layer), gpu, cache, limits, None, False, None)
    parts = (part.partition("+")[0] for part in record.device.split("-"))  # without what there is beside vectors
    (level,) = (part for part in parts if part in ("amx", "avx512", "avx2", "generic"))
    vectors, unit = ("avx512", "amx") if level == "amx" else (level, None)
    threads = int(record.device.rpartition("threads")[2])
    device = Elsewhere(threads, vectors, matrix_unit=unit, recorded=record.device)
    return Request(ConvLayer.parse(record.layer), device, cache, limits, None, False, None)


def test_a_shipped_winner_is_of_today_s_version_or_said_not_to_be(tmp_path: Path) -> None:
    here = {
        gpu: {one.name: one.version for one in registry.algorithms(NOMINAL if gpu else CPU.current())}
        for gpu in (False, True)
    }
    cache, records = TuningCache(tmp_path), shipped(tmp_path)
    assert records
    for record in records:
        request = asked(record, cache)
        facts = record.facts(request.unchanged)
        versions = here[record.device.startswith("cuda-")]
        best = ranking(request.usable(facts), request.limits, request.layer.bytes)[0]
        if facts[best].version == versions[best.algorithm]:
            assert choose(request, "cached").source == "cache", record.layer
        else:
            with pytest.raises(PlanError) as refusal:
                choose(request, "cached")
            said = str(refusal.value)
            assert "tune the layer" in said, record.layer
            if "nothing recorded for" not in said:  # there is a candidate today of something on record
                named = re.search(r"(\S+), the winner on record", said)
                assert named is not None, record.layer
                former = Candidate.parse(named[1])  # of the last race that asked about all
                assert facts[former].version != versions[former.algorithm], record.layer
