"""Kernels for what lies between convolutions in a network, and what runs many kernels in one call.

Each module's `emit` writes `run` for arrays of one shape. Inputs are the operands a, b, bias, residual and workspace,
in this order, and the output is `out`; all arrays are float32 unless `emit` takes their types.
"""

INPUTS = (0, 1, 3, 4, 5)  # their slots in a context
OUTPUT = 2
TASK_ELEMENTS = 1 << 14  # of a task: some microseconds of work
