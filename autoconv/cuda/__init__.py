"""Convolution on NVIDIA GPUs: the table of contents of its families."""

FAMILIES = ("direct", "stem", "gemm", "hopper", "depthwise", "winograd", "fft", "libraries")
