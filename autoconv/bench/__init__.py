"""Our kernels against other libraries, interleaved in one run."""
