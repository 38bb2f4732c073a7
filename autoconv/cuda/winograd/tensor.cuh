// What the transforms around products on tensor cores share. Each tile is a pixel, each point of a group a group of its
// own, in NHWC; behind the channels of each there are zeros, up to a multiple of what the product reads at once.
#pragma once
#include "winograd.cuh"

constexpr int SIDE = 32, ACROSS = THREADS / SIDE;  // channels of a block, each a lane of every warp, and tiles
constexpr int DEPTH_PADDED = ceil_div(static_cast<int>(DEPTH), DEPTH_UNIT) * DEPTH_UNIT;

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

// The points of every tile and channel, V[tile, point, group, channel]: of CHANNELS to a group, followed by zeros up to
// PADDED. `transform(channel, tile, exists, put)` has them column by column.
template <int CHANNELS, int PADDED, class Transform>
DEVICE void put_points(Acc* V, Transform transform) {
    constexpr int LINE = static_cast<int>(GROUPS) * PADDED;
    const Job from = job<LINE>(!LAST), to = job<LINE>(false);
    const int group = from.channel / PADDED, depth = from.channel % PADDED;
    const bool exists = group < GROUPS && depth < CHANNELS && from.tile < TILES;
    Acc* const line = V + (long long)to.tile * POINTS * LINE + to.channel;
    transform(group * CHANNELS + depth, from.tile, exists, [&](int j, Acc (&points)[AH]) {
        exchange(j, points, from, to);
        if (to.channel < LINE && to.tile < TILES)
#pragma unroll
            for (int i = 0; i < AH; i++) line[(long long)(i * AW + j) * LINE] = points[i];
    });
}

struct InputPoints {  // NVRTC takes lambdas with parameters of any type for functions of the host
    const T* x;
    template <class Put>
    DEVICE void operator()(int channel, Offset tile, bool exists, Put put) const {
        transform_input(x, channel, tile, exists, put);
    }
};
DEVICE void put_input_points(const T* x, Acc* V) {
    put_points<static_cast<int>(DEPTH), DEPTH_PADDED>(V, InputPoints{x});
}
