// What transposes filters, images and outputs for the product of images innermost.

#include "chwn.cuh"

constexpr int LINES = THREADS / 32;  // that are transposed together

struct Square {
    Acc at[32][33];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) chwn_filter(const T* w, Acc* U) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (long long)GROUPS * DEPTH * TAPS * KEPT) return;
    const int row = static_cast<int>(at % KEPT), tap = static_cast<int>(at / KEPT % TAPS);
    const int depth = static_cast<int>(at / KEPT / TAPS % DEPTH), group = static_cast<int>(at / KEPT / TAPS / DEPTH);
    const int r = tap / static_cast<int>(S), s = tap % static_cast<int>(S);
    U[at] = row < ROWS ? Acc(to_float(w[filter_at(group, row, depth, r, s)])) : Acc(0);
}

// An element of an image in memory's order, as the number of its row of images.
DEVICE Offset row_of_images(Offset element, Offset pixels, Offset channels) {
    return LAST ? element % channels * pixels + element / channels : element;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) chwn_in(const T* in, T* X) {
    SHARED(Square, square);
    const int lane = static_cast<int>(threadIdx.x) % 32, line = static_cast<int>(threadIdx.x) / 32;
    const Offset element = Offset(blockIdx.x) * 32, image = Offset(blockIdx.y) * 32;
#pragma unroll
    for (int i = line; i < 32; i += LINES) {
        const bool exists = image + i < N && element + lane < IN;
        square.at[i][lane] = exists ? Acc(to_float(in[(image + i) * IN + element + lane])) : Acc(0);
    }
    __syncthreads();
#pragma unroll
    for (int i = line; i < 32; i += LINES)
        if (element + i < IN && image + lane < IMAGES)
            X[row_of_images(element + i, IN_H * IN_W, GROUPS * DEPTH) * IMAGES + image + lane] =
                Rounded<T>::from(square.at[lane][i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
chwn_out(const char* workspace, T* out, const T* bias, const T* residual) {
    SHARED(Square, square);
    const Acc* Y = reinterpret_cast<const Acc*>(workspace + Y_AT);
    const int lane = static_cast<int>(threadIdx.x) % 32, line = static_cast<int>(threadIdx.x) / 32;
    const Offset element = Offset(blockIdx.x) * 32, image = Offset(blockIdx.y) * 32;
#pragma unroll
    for (int i = line; i < 32; i += LINES)
        if (element + i < OUT && image + lane < IMAGES)
            square.at[i][lane] = Y[(element + i) * IMAGES + image + lane];
    __syncthreads();
#pragma unroll
    for (int i = line; i < 32; i += LINES) {
        const Offset at = (image + i) * OUT + element + lane;
        const int channel = static_cast<int>((element + lane) / (OUT_H * OUT_W));
        if (image + i < N && element + lane < OUT)
            out[at] = finished(square.at[lane][i], bias, residual, channel, at);
    }
}
