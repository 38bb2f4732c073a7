// An expression of arrays that lie in memory with whatever strides, one element of the output to a thread.

#include "shapes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
elementwise(Stored* out, const void* a, const void* b, const void* c, const void* d, const void* e) {
    const Offset i = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (i < TOTAL) store(i, out, a, b, c, d, e);
}
