"""Writing kernels as LLVM IR, and compiling them."""
