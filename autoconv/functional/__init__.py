"""`conv2d`, its gradients and its quantised form, on arrays, planned when a shape is first seen."""

from autoconv.functional.convolution import conv2d, conv2d_dgrad, conv2d_wgrad, conv_transpose2d
from autoconv.functional.quantized import conv2d_quantized

__all__ = ["conv2d", "conv2d_dgrad", "conv2d_quantized", "conv2d_wgrad", "conv_transpose2d"]
