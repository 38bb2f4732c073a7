"""Running a graph: kernels for its nodes, one block of memory for its arrays, one call for all of it."""
