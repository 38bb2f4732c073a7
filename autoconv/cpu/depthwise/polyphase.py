"""dgrad of strided layers as one convolution of unit stride, computed by `depthwise`."""

from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.depthwise.algorithm import Depthwise


class DepthwisePolyphase(Polyphase):
    """The polyphase components of dx by `depthwise`."""

    name = "depthwise.polyphase"
    layouts = ("NCHW",)
    groupings = ("depthwise",)
    exact = True
    inner = Depthwise()
