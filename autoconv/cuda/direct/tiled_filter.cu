// Filters as the tiled kernels want them.

#include "tiled.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tiled_filter(const T* w, Acc* U) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (long long)GROUPS * ROW_BLOCKS * SLICES * FILTERS) return;
    const int tap = static_cast<int>(at / BM % TAPS), depth = static_cast<int>(at / BM / TAPS % (SLICES * BK));
    const int block = static_cast<int>(at / FILTERS / SLICES);
    const int row = block % ROW_BLOCKS * BM + static_cast<int>(at % BM);
    const int rotated = BACK ? TAPS - 1 - tap : tap;
    const int r = rotated / static_cast<int>(S), s = rotated % static_cast<int>(S);
    const bool exists = row < ROWS && depth < DEPTH;
    U[at] = exists ? Acc(to_float(w[filter_at(block / ROW_BLOCKS, row, depth, r, s)])) : Acc(0);
}
