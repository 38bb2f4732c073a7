"""autoconv finds the fastest way to compute a convolution layer on this machine, and remembers it."""

from autoconv.algorithm import Algorithm, Candidate, Kernel
from autoconv.common.epilogue.quantization import Quantization
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import ArrayError, AutoconvError, ConfigError, LayerError, PlanError, RecordError
from autoconv.functional import conv2d, conv2d_dgrad, conv2d_quantized, conv2d_wgrad, conv_transpose2d
from autoconv.layer import ConvLayer
from autoconv.networks.collect import collect
from autoconv.networks.run.compiled import CompiledNetwork, load
from autoconv.plans import PackedWeights, Plan
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import forget_plans, plan

__version__ = "0.1.0"

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
