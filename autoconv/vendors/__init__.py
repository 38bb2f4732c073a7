"""Other libraries' convolutions as candidates, by the kind of device: found at run time, never required."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.vendors.adapters import Onnxruntime, Torch

ALGORITHMS: dict[str, tuple[Algorithm[Any], ...]] = {"cpu": (Torch(), Onnxruntime())}
