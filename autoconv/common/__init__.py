"""What every device and every room may use: mathematics of transforms, machine code on disk, versions of code."""
