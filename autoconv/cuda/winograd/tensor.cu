// The transforms around products on tensor cores, which are a convolution with filters of one tap: each tile is a pixel,
// and each point of a group a group of its own, in NHWC. Behind the channels of each there are zeros, up to a multiple of
// what the product reads at once.
//   V[tile, point, group, channel], U[point, group, filter, channel], M[tile, point, group, filter]

#include "winograd.cuh"

constexpr int SIDE = 32, ACROSS = THREADS / SIDE;  // channels of a block, each a lane of every warp, and tiles
constexpr int DEPTH_PADDED = ceil_div(static_cast<int>(DEPTH), DEPTH_UNIT) * DEPTH_UNIT;
constexpr int LINE_IN = static_cast<int>(GROUPS) * DEPTH_PADDED, LINE_OUT = static_cast<int>(GROUPS * ROWS);  // of a point

// A thread's channel (of all groups) and tile: as they lie in V and M, channels first; and as they do in the arrays, where
// those of NCHW have tiles first.
struct Job {
    int lane, row;  // in the block
    int channel;
    Offset tile;
};
template <int LINE>
DEVICE Job job(bool tiles_first) {
    constexpr int BLOCKS_ACROSS = ceil_div(LINE, SIDE);
    const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
    const int lane = tiles_first ? thread / ACROSS : thread % SIDE, row = tiles_first ? thread % ACROSS : thread / SIDE;
    return {lane, row, block % BLOCKS_ACROSS * SIDE + lane, Offset(block / BLOCKS_ACROSS) * ACROSS + row};
}

// A column of points, from the thread that has it to the one that wants it. Lanes of eight channels and four tiles meet
// all banks; of two places one is filled while the other is read.
struct Columns {
    Acc at[2][AH][ACROSS][SIDE + 8];
};
DEVICE void exchange(int j, Acc (&points)[AH], const Job& from, const Job& to) {
    if constexpr (!LAST) {
        SHARED(Columns, columns);
#pragma unroll
        for (int i = 0; i < AH; i++) columns.at[j % 2][i][from.row][from.lane] = points[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < AH; i++) points[i] = columns.at[j % 2][i][to.row][to.lane];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) filter_points(const T* w, Acc* U) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    constexpr long long ALL = (long long)GROUPS * ROWS * DEPTH_PADDED;
    if (at >= ALL) return;
    const int depth = static_cast<int>(at % DEPTH_PADDED), row = static_cast<int>(at / DEPTH_PADDED % ROWS);
    const int group = static_cast<int>(at / DEPTH_PADDED / ROWS);
    if (depth < DEPTH)
        transform_filter(w, group, row, depth, [&](int point, Acc value) { U[point * ALL + at] = value; });
    else
        for (int point = 0; point < POINTS; point++) U[point * ALL + at] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) input_points(const T* x, Acc* V) {
    const Job from = job<LINE_IN>(!LAST), to = job<LINE_IN>(false);
    const int group = from.channel / DEPTH_PADDED, depth = from.channel % DEPTH_PADDED;
    const bool exists = group < GROUPS && depth < DEPTH && from.tile < TILES;
    Acc* const line = V + (long long)to.tile * POINTS * LINE_IN + to.channel;
    transform_input(x, static_cast<int>(group * DEPTH) + depth, from.tile, exists, [&](int j, Acc (&points)[AH]) {
        exchange(j, points, from, to);
        if (to.channel < LINE_IN && to.tile < TILES)
#pragma unroll
            for (int i = 0; i < AH; i++) line[(long long)(i * AW + j) * LINE_IN] = points[i];
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
output_tiles(const Acc* M, T* out, const T* bias, const T* residual) {
    const Job from = job<LINE_OUT>(false), to = job<LINE_OUT>(!LAST);
    const Acc* const line = M + (long long)from.tile * POINTS * LINE_OUT + from.channel;
    const bool there = from.channel < LINE_OUT && from.tile < TILES;
    write_columns([&](int j, Acc (&points)[AH]) {
#pragma unroll
        for (int i = 0; i < AH; i++) points[i] = there ? line[(long long)(i * AW + j) * LINE_OUT] : Acc(0);
        exchange(j, points, from, to);
    }, to.channel, to.tile, to.channel < LINE_OUT && to.tile < TILES, out, bias, residual);
}
