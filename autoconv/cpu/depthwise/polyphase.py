"""dgrad of strided layers as one convolution of unit stride, computed by `depthwise`."""

from autoconv.cpu.common.polyphase import Polyphase
from autoconv.cpu.depthwise.algorithm import Depthwise


class DepthwisePolyphase(Polyphase):
    """The polyphase components of dx by `depthwise`."""

    name = "depthwise.polyphase"
    exact = True
    inner = Depthwise()
