// Elements around an array: a constant, or some of its own.

#include "shapes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) pad(Word* out, const Word* x) {
    const Offset i = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= TOTAL) return;
    const Offset at = source_of(i);
    out[i] = at < 0 ? FILL : x[at];
}
