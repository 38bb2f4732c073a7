// Pooling: the largest element of a window, or the average, one output to a thread.

#include "shapes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) pool(float* out, const float* x) {
    const Offset i = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= TOTAL) return;
    const Offset q = i / INNER % Q, p = i / INNER / Q % P, image = i / INNER / Q / P;
    const Offset top = p * STRIDE_H - PAD_TOP, left = q * STRIDE_W - PAD_LEFT;
    const float* plane = x + image * H * W * INNER + i % INNER;
    float found = LARGEST ? bits_float(0xff800000u) : 0.0f;
    int rows = 0, columns = 0;  // that count
    for (int s = 0; s < WINDOW_W; s++) columns += left + s * DILATION_W >= LOW_W && left + s * DILATION_W < HIGH_W;
    for (int r = 0; r < WINDOW_H; r++) {
        const Offset h = top + r * DILATION_H;
        rows += h >= LOW_H && h < HIGH_H;
        if (h < 0 || h >= H) continue;
        for (int s = 0; s < WINDOW_W; s++) {
            const Offset w = left + s * DILATION_W;
            if (w < 0 || w >= W) continue;
            const float value = plane[(h * W + w) * INNER];
            found = LARGEST ? larger(found, value) : found + value;
        }
    }
    const int count = rows * columns;
    out[i] = LARGEST || count == 0 ? found : found / static_cast<float>(count);
}
