"""autoconv finds the fastest way to compute a convolution layer on this machine, and remembers it."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoconv.algorithm import Algorithm, Candidate, Kernel
from autoconv.common.epilogue.quantization import Quantization
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import ArrayError, AutoconvError, ConfigError, LayerError, PlanError, RecordError
from autoconv.functional import conv2d, conv2d_dgrad, conv2d_quantized, conv2d_wgrad, conv_transpose2d
from autoconv.layer import ConvLayer
from autoconv.plans import PackedWeights, Plan
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import forget_plans, plan

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autoconv.networks.collect import collect
    from autoconv.networks.compiled.loading import load
    from autoconv.networks.compiled.network import CompiledNetwork
else:
    # What networks are made of is imported when it is first asked for: it takes as long as all the rest.
    _LATER = {
        "CompiledNetwork": "autoconv.networks.compiled.network",
        "collect": "autoconv.networks.collect",
        "load": "autoconv.networks.compiled.loading",
    }

    def __getattr__(name: str) -> Any:
        if name == "networks":
            return import_module("autoconv.networks")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_LATER[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, "networks"})


__all__ = [
    "CPU",
    "Algorithm",
    "ArrayError",
    "AutoconvError",
    "Candidate",
    "CompiledNetwork",
    "ConfigError",
    "ConvLayer",
    "Device",
    "Kernel",
    "LayerError",
    "PackedWeights",
    "Plan",
    "PlanError",
    "Quantization",
    "RecordError",
    "TuningCache",
    "collect",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_quantized",
    "conv2d_wgrad",
    "conv_transpose2d",
    "forget_plans",
    "load",
    "plan",
]

if os.environ.get("AUTOCONV_COLLECT"):
    import_module("autoconv.networks.collect")  # it watches this process from here on
