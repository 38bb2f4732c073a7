"""What nodes compute."""

from autoconv.networks.operators.base import Operator, Product, TensorType, random_inputs
from autoconv.networks.operators.convolution import Conv, ConvTranspose, MatMul
from autoconv.networks.operators.elementwise import Elementwise
from autoconv.networks.operators.foreign import Foreign, ForeignOnnx
from autoconv.networks.operators.foreign_torch import ForeignTorch
from autoconv.networks.operators.fused import FusedConv
from autoconv.networks.operators.pooling import LRN, Normalization, Pool, Reduce, Softmax
from autoconv.networks.operators.quantized import QuantizedConv, QuantizedMatMul, QuantizedProduct
from autoconv.networks.operators.shapes import Concat, Pad, Reshape, Resize, Slice, Transpose

__all__ = [
    "LRN",
    "Concat",
    "Conv",
    "ConvTranspose",
    "Elementwise",
    "Foreign",
    "ForeignOnnx",
    "ForeignTorch",
    "FusedConv",
    "MatMul",
    "Normalization",
    "Operator",
    "Pad",
    "Pool",
    "Product",
    "QuantizedConv",
    "QuantizedMatMul",
    "QuantizedProduct",
    "Reduce",
    "Reshape",
    "Resize",
    "Slice",
    "Softmax",
    "TensorType",
    "Transpose",
    "random_inputs",
]
