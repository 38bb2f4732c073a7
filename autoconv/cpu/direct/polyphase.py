"""dgrad of strided layers as one convolution of unit stride, computed by `direct`."""

from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.direct.algorithm import Direct


class DirectPolyphase(Polyphase):
    """The polyphase components of dx by `direct`."""

    name = "direct.polyphase"
    exact = True
    inner = Direct()
