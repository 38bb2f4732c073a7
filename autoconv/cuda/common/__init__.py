"""What the families of kernels on a GPU share."""
