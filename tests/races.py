"""Made-up races, and the keys of records that they stand in."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from autoconv.algorithm import Candidate
from autoconv.records.schema import Facts, Race

LAYER = "fwd-float32-NCHW-N1-C3-H8-W8-K4-R3-S3"
OTHER = "fwd-float32-NCHW-N2-C3-H8-W8-K4-R3-S3"
DEVICE = "cpu-GenuineIntel-6-85-7-avx512-L1:32K-threads2"


def facts(time: float, **changes: Any) -> Facts:
    return replace(Facts(version="1", time=time, samples=5), **changes)


def race(when: int = 1, **times: float) -> Race:
    found = {Candidate(name): facts(time) for name, time in times.items()}
    return Race(uuid.uuid4().hex, f"2026-01-{when:02}T00:00:00+00:00", {"numpy": "2"}, False, None, found)
