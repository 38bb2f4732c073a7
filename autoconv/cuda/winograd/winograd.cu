// Winograd's minimal filtering in four kernels: filters U and inputs V are transformed, their products summed
// over channels as one matrix product to each of the POINTS, and the sums transformed back. V and M keep the
// order of the arrays: with channels last, channels are neighbours there too.

#include "../common/gemm_tile.cuh"
#include "filtered.cuh"

constexpr long long V_SIZE = ((long long)POINTS * GROUPS * DEPTH * TILES + 63) / 64 * 64;

DEVICE long long matrix(int point, int group, Offset rows, Offset columns) {
    return (long long)(point * GROUPS + group) * rows * columns;
}
DEVICE Offset in_matrix(Offset channel, Offset tile, Offset channels) {
    return LAST ? tile * channels + channel : channel * TILES + tile;
}

// A thread's channel (of all groups) and tile; neighbours in memory go to neighbouring threads.
struct Job {
    int channel;
    Offset tile;
    bool exists;
};
DEVICE Job job(Offset channels) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const Offset inner = static_cast<Offset>(at % (LAST ? channels : TILES));
    const Offset outer = static_cast<Offset>(at / (LAST ? channels : TILES));
    return {static_cast<int>(LAST ? inner : outer), LAST ? outer : inner, at < (long long)channels * TILES};
}


extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) winograd_filter(const T* w, Acc* U) {
    const Offset at = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= GROUPS * ROWS * DEPTH) return;
    const int group = static_cast<int>(at / (ROWS * DEPTH));
    const int row = static_cast<int>(at / DEPTH % ROWS), depth = static_cast<int>(at % DEPTH);
    transform_filter(w, group, row, depth, [&](int point, Acc value) {
        U[matrix(point, group, ROWS, DEPTH) + row * DEPTH + depth] = value;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) winograd_input(const T* x, Acc* workspace) {
    const Job mine = job(GROUPS * DEPTH);
    if (!mine.exists) return;
    const int group = mine.channel / static_cast<int>(DEPTH);
    const Offset at = in_matrix(mine.channel % DEPTH, mine.tile, DEPTH);
    transform_input(x, mine.channel, mine.tile, true, [&](int j, const Acc (&points)[AH]) {
#pragma unroll
        for (int i = 0; i < AH; i++) workspace[matrix(i * AW + j, group, DEPTH, TILES) + at] = points[i];
    });
}

// Lines of a matrix, so many steps apart along and across the depth.
struct Lines {
    Offset count, step, depth_step;
    DEVICE Offset across(Offset i) const { return i < count ? i * step : OUTSIDE; }
    DEVICE Offset along(Offset slice, int k) const { return slice + k < DEPTH ? (slice + k) * depth_step : OUTSIDE; }
    DEVICE static Position meet(Offset across, Offset along) { return sum_of(across, along); }
};

// M[point, group] = U[point, group] V[point, group]
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, PRODUCT_BLOCKS)
winograd_product(const Acc* U, Acc* workspace) {
    SHARED(Slices, slices);
    const int point = static_cast<int>(blockIdx.z) / GROUPS, group = static_cast<int>(blockIdx.z) % GROUPS;
    const Offset row0 = Offset(blockIdx.y) * BM, tile0 = Offset(blockIdx.x) * BN;
    constexpr int A_RUN = DEPTH % 4 == 0 ? 4 : 1, B_RUN = (LAST ? DEPTH : TILES) % 4 == 0 ? 4 : 1;
    constexpr Lines FILTERS = {ROWS, DEPTH, 1}, IMAGE = {TILES, LAST ? DEPTH : 1, LAST ? 1 : TILES};
    constexpr int SLICES = static_cast<int>((DEPTH + BK - 1) / BK);
    Acc sum[TM][TN] = {};
    multiply_tile<true, A_RUN, LAST, B_RUN, (SLICES > 1)>(
        sum, slices, 0, SLICES, U + matrix(point, group, ROWS, DEPTH), workspace + matrix(point, group, DEPTH, TILES),
        FILTERS, row0, IMAGE, tile0);
    Acc* M = workspace + V_SIZE + matrix(point, group, ROWS, TILES);
#pragma unroll
    for (int j = 0; j < TN; j++)
#pragma unroll
        for (int i = 0; i < TM; i++) {
            const Offset row = row0 + row_of(i), tile = tile0 + column_of(j);
            if (row < ROWS && tile < TILES) M[in_matrix(row, tile, ROWS)] = sum[i][j];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
winograd_output(const Acc* workspace, T* out, const T* bias, const T* residual) {
    const Job mine = job(GROUPS * ROWS);
    if (!mine.exists) return;
    const Acc* M = workspace + V_SIZE + in_matrix(mine.channel % ROWS, mine.tile, ROWS);
    const int group = mine.channel / static_cast<int>(ROWS);
    write_tile([&](int point) { return M[matrix(point, group, ROWS, TILES)]; }, mine.channel, mine.tile, out, bias,
               residual);
}
