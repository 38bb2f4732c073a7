"""autoconv finds the fastest way to compute a convolution layer on this machine, and remembers it."""
