"""Other libraries' convolutions as candidates, by the kind of device: found at run time, never required."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.vendors.onnxruntime import Onnxruntime
from autoconv.vendors.torch import Torch

ALGORITHMS: dict[str, tuple[Algorithm[Any], ...]] = {"cpu": (Torch(), Onnxruntime())}
