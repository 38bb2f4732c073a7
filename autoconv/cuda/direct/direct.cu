// The definition, one output element to a thread: any layer, in any direction, without workspace.

#include "../common/common.cuh"

constexpr Offset TOTAL = DIRECTION == FWD     ? Offset(N) * K * P * Q
                         : DIRECTION == DGRAD ? Offset(N) * C * H * W
                                              : Offset(K) * CG * R * S;

DEVICE Acc forward(const T* x, const T* w, Offset n, int k, Offset p, Offset q) {
    Acc sum = 0;
    const int c0 = k / KG * CG;
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) {
            const Offset h = p * STRIDE_H - PAD_TOP + r * DILATION_H, v = q * STRIDE_W - PAD_LEFT + s * DILATION_W;
            if (!within(h, H) || !within(v, W)) continue;
            for (int c = 0; c < CG; c++) sum += Acc(to_float(x[x_at(n, c0 + c, h, v)])) * to_float(w[w_at(k, c, r, s)]);
        }
    return sum;
}

DEVICE Acc backward_data(const T* dy, const T* w, Offset n, int c, Offset h, Offset v) {
    Acc sum = 0;
    const int k0 = c / CG * KG;
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) {
            const Offset p = output_of(h, r, PAD_TOP, STRIDE_H, DILATION_H, P);
            const Offset q = output_of(v, s, PAD_LEFT, STRIDE_W, DILATION_W, Q);
            if (p < 0 || q < 0) continue;
            for (int k = 0; k < KG; k++)
                sum += Acc(to_float(dy[y_at(n, k0 + k, p, q)])) * to_float(w[w_at(k0 + k, c % CG, r, s)]);
        }
    return sum;
}

DEVICE Acc backward_filter(const T* x, const T* dy, Offset k, int c, int r, int s) {
    Acc sum = 0;
    const int c0 = static_cast<int>(k / KG) * CG;
    for (int n = 0; n < N; n++)
        for (Offset p = 0; p < P; p++)
            for (Offset q = 0; q < Q; q++) {
                const Offset h = p * STRIDE_H - PAD_TOP + r * DILATION_H, v = q * STRIDE_W - PAD_LEFT + s * DILATION_W;
                if (within(h, H) && within(v, W))
                    sum += Acc(to_float(x[x_at(n, c0 + c, h, v)])) * to_float(dy[y_at(n, static_cast<int>(k), p, q)]);
            }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
direct(const T* a, const T* b, T* out, const T* bias, const T* residual) {
    const Offset at = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= TOTAL) return;
    // the three inner extents of the output, in memory order after its slowest
    constexpr Offset channels = DIRECTION == FWD ? K : DIRECTION == DGRAD ? C : CG;
    constexpr Offset height = DIRECTION == FWD ? P : DIRECTION == DGRAD ? H : R;
    constexpr Offset width = DIRECTION == FWD ? Q : DIRECTION == DGRAD ? W : S;
    const Offset inner = LAYOUT == NCHW ? at : at / channels;
    const Offset j = inner % width, i = inner / width % height;
    const Offset rest = inner / width / height;
    const int channel = static_cast<int>(LAYOUT == NCHW ? rest % channels : at % channels);
    const Offset image = LAYOUT == NCHW ? rest / channels : rest;
    if constexpr (DIRECTION == FWD)
        out[at] = finished(forward(a, b, image, channel, i, j), bias, residual, channel, at);
    else if constexpr (DIRECTION == DGRAD)
        out[at] = finished(backward_data(a, b, image, channel, i, j), bias, residual, channel, at);
    else
        out[at] = Rounded<T>::from(backward_filter(a, b, image, channel, static_cast<int>(i), static_cast<int>(j)));
}
