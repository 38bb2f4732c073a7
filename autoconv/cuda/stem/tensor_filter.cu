// Filters in fragments of matrix instructions, in parts, filled up with zeros.

#include "tensor.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) direct_tensor_filter(const T* w, Fragment* U) {
    const int at = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (at >= FILTER_BLOCKS * STEPS * PAIRS * 32) return;
    const int lane = at % 32, pair = at / 32 % PAIRS, step = at / 32 / PAIRS % STEPS, block = at / 32 / PAIRS / STEPS;
    const int entry = 4 * step + lane % 4, tap = entry / QUADS, c0 = entry % QUADS * QUAD;
    Fragment fragment[PARTS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int group = 2 * pair + half, of_lane = lane / 4;
        const int k = block * BM + (FILTER_ROWS ? row_of(group, of_lane) : column_of(group, of_lane));
        T value[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            const bool exists = k < K && entry < ENTRIES && c0 + i < C;
            value[i] = exists ? w[w_at(k, c0 + i, tap / static_cast<int>(S), tap % static_cast<int>(S))] : T{};
        }
        Quad quad[PARTS];
        split(quad, value);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            fragment[p].word[word_of(half, 0)] = quad[p].word[0];
            fragment[p].word[word_of(half, 1)] = quad[p].word[1];
        }
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) U[block * FRAGMENTS + fragment_at(p, step, pair, lane)] = fragment[p];
}
