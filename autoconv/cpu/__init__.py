"""Convolution on a CPU: the table of contents of its families."""

FAMILIES = ("direct", "winograd", "fft", "gemm", "gemm_packed", "depthwise", "matrix", "int8", "numpy")
