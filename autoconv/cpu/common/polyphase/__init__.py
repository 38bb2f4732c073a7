"""The gradient of a strided layer's input by polyphase components: one convolution of unit stride, and interleaving."""
