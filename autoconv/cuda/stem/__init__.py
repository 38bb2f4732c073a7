"""Layers of few input channels, the first ones of networks, on a GPU."""

from typing import Any

from autoconv.algorithm import Algorithm
from autoconv.cuda.stem.tensor import DirectTensor, DirectTensorBF16x6
from autoconv.cuda.stem.tensor_wgrad import DirectTensorWgrad

ALGORITHMS: tuple[Algorithm[Any], ...] = (DirectTensor(), DirectTensorBF16x6(), DirectTensorWgrad())
