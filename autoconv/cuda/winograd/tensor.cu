// The transforms around products on tensor cores, which are a convolution with filters of one tap.
//   V[tile, point, group, channel], U[point, group, filter, channel], M[tile, point, group, filter]
#include "../hopper/parts.cuh"
#include "filtered.cuh"
#include "tensor.cuh"

constexpr int LINE_OUT = static_cast<int>(GROUPS * ROWS);  // of a point

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

// The same in parts, as `split` wants them.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) filter_parts(const T* w, bfloat16_t* to) {
    constexpr int CHUNK = DEPTH_UNIT % STEP ? STEP : DEPTH_UNIT;  // the other family has smaller units, and no parts
    constexpr long long ALL = (long long)GROUPS * ROWS * DEPTH_PADDED, PART = ROWS * CHUNK;
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= ALL) return;
    const int depth = static_cast<int>(at % DEPTH_PADDED), row = static_cast<int>(at / DEPTH_PADDED % ROWS);
    const int group = static_cast<int>(at / DEPTH_PADDED / ROWS), step = depth % CHUNK / STEP * STEP;
    bfloat16_t* const line = to + row * CHUNK + step + place_of(depth % STEP);
    const auto put = [&](int point, Acc value) {
        const long long block = (long long)(point * GROUPS + group) * (DEPTH_PADDED / CHUNK) + depth / CHUNK;
        float values[1] = {value};
        put_parts(line + block * (PARTS * PART), PART, values);
    };
    if (depth < DEPTH)
        transform_filter(w, group, row, depth, put);
    else
        for (int point = 0; point < POINTS; point++) put(point, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) input_points(const T* x, Acc* V) { put_input_points(x, V); }

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
