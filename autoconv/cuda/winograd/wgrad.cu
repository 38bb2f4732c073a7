// The gradient of the filters: a tile of x, correlated with the tile of dy that it meets, is a tile of filters. So dy is
// what is transformed as filters are elsewhere, of MH by MW taps, the outputs are R by S, and all tiles are summed.
//   V[tile, point, group, channel], D[tile, point, group, filter], M[point, group, filter, channel]
#include "tensor.cuh"

constexpr int ROWS_PADDED = ceil_div(static_cast<int>(ROWS), DEPTH_UNIT) * DEPTH_UNIT;

// A tile's points, column by column: `put(j, points)`. Of a tile or channel that does not exist, zeros.
template <class Put>
DEVICE void transform_gradient(const T* dy, int channel, Offset tile, bool exists, Put put) {
    const Corner first = corner(tile);
    Acc half[MH][AW];
#pragma unroll
    for (int i = 0; i < MH; i++) {
        Acc pixels[MW];
#pragma unroll
        for (int j = 0; j < MW; j++) {
            const bool inside = exists && first.h + i < P && first.w + j < Q;
            pixels[j] = inside ? Acc(to_float(dy[y_at(first.n, channel, first.h + i, first.w + j)])) : Acc(0);
        }
        filter_w(pixels, half[i]);
    }
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc pixels[MH], points[AH];
#pragma unroll
        for (int i = 0; i < MH; i++) pixels[i] = half[i][j];
        filter_h(pixels, points);
        put(j, points);
    }
}

struct GradientPoints {
    const T* dy;
    template <class Put>
    DEVICE void operator()(int channel, Offset tile, bool exists, Put put) const {
        transform_gradient(dy, channel, tile, exists, put);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) input_points(const T* x, Acc* V) { put_input_points(x, V); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradient_points(const T* dy, Acc* D) {
    put_points<static_cast<int>(ROWS), ROWS_PADDED>(D, GradientPoints{dy});
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) filter_sums(const Acc* M, T* dw) {
    constexpr long long ALL = (long long)GROUPS * ROWS_PADDED * DEPTH_PADDED;
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const int depth = static_cast<int>(at % DEPTH_PADDED), row = static_cast<int>(at / DEPTH_PADDED % ROWS_PADDED);
    const int group = static_cast<int>(at / DEPTH_PADDED / ROWS_PADDED);
    if (at >= ALL || depth >= DEPTH || row >= ROWS) return;
    Acc half[R][AW];
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc points[AH], taps[R];
#pragma unroll
        for (int i = 0; i < AH; i++) points[i] = M[(i * AW + j) * ALL + at];
        output_h(points, taps);
#pragma unroll
        for (int r = 0; r < R; r++) half[r][j] = taps[r];
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        Acc taps[S];
        output_w(half[r], taps);
#pragma unroll
        for (int s = 0; s < S; s++) dw[w_at(group * KG + row, depth, r, s)] = taps[s];
    }
}
