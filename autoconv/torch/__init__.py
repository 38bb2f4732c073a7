"""For users of PyTorch: a convolution with gradients, a module of it, and whole models made faster.

This is the only way in by which autoconv imports `torch`, which is an extra.
"""

from autoconv.torch.functional import conv2d
from autoconv.torch.modules import Conv2d, replace_convolutions
from autoconv.torch.optimized import OptimizedModule, optimize
from autoconv.torch.threads import share_threads

__all__ = ["Conv2d", "OptimizedModule", "conv2d", "optimize", "replace_convolutions", "share_threads"]

share_threads()
