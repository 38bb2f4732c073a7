"""What `autoconv bench` measures against, by name: six ways to run a convolution on a CPU, of five libraries.

In types of 16 bits there are three, all of PyTorch's.
"""

from __future__ import annotations

import os
import sys

from autoconv.bench.baselines import mnn, ncnn, onnxruntime, openvino, torch
from autoconv.bench.baselines.base import Baseline as Baseline
from autoconv.bench.baselines.base import Prepared as Prepared
from autoconv.bench.baselines.base import Problem as Problem
from autoconv.errors import PlanError

ALL_BASELINES = {
    baseline.name: baseline for module in (torch, onnxruntime, openvino, ncnn, mnn) for baseline in module.BASELINES
}
BASELINES = {name: baseline for name, baseline in ALL_BASELINES.items() if "float32" in baseline.dtypes}
DTYPES = tuple(dict.fromkeys(dtype for baseline in ALL_BASELINES.values() for dtype in baseline.dtypes))

# What restricts PyTorch to fewer vector instructions than the processor has; the others have nothing of the kind.
RESTRICTIONS = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "ATEN_CPU_CAPABILITY": "avx512"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


def restrict(instruction_set: str) -> dict[str, str]:
    """Restrict the libraries that allow it to an instruction set.

    Returns
    -------
    dict
        The environment variables that do so, which are now set.

    Raises
    ------
    PlanError
        When torch was imported before: it reads them once.
    """
    if "torch" in sys.modules:
        raise PlanError(
            f"instruction set {instruction_set}: torch has been imported already, and reads its limits only then"
        )
    os.environ.update(RESTRICTIONS[instruction_set])
    return RESTRICTIONS[instruction_set]
