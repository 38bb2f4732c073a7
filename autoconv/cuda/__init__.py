"""Convolution on NVIDIA GPUs: the table of contents of its families."""

FAMILIES = ("direct", "gemm", "depthwise", "winograd", "fft", "libraries")
