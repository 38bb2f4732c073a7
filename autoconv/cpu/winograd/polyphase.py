"""dgrad of strided layers as one convolution of unit stride, computed by `winograd`."""

from autoconv.cpu.common.polyphase.algorithm import Polyphase
from autoconv.cpu.winograd.algorithm import Winograd


class WinogradPolyphase(Polyphase):
    """The polyphase components of dx by `winograd`."""

    name = "winograd.polyphase"
    inner = Winograd()
