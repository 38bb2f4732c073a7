"""For users of PyTorch: convolutions with gradients, modules of them, and whole models made faster.

`torch` is an extra. Nothing else imports it, unless it is to be timed as a vendor or compared with.
"""

from autoconv.torch.functional import conv2d, conv_transpose2d
from autoconv.torch.modules import Conv2d, ConvTranspose2d, replace_convolutions
from autoconv.torch.optimized import OptimizedModule, optimize
from autoconv.torch.threads import share_threads

__all__ = [
    "Conv2d",
    "ConvTranspose2d",
    "OptimizedModule",
    "conv2d",
    "conv_transpose2d",
    "optimize",
    "replace_convolutions",
    "share_threads",
]

share_threads()
