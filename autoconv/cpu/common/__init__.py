"""What families with generated kernels share: the geometry of correlations, epilogues, packed operands."""
