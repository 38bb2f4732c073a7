"""CUDA text to machine code: constants of a layer, the compiler, occupancy, tensor maps."""
