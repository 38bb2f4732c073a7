// Local response normalisation: an element over a power of the sum of squares around it, across channels.

#include "shapes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) lrn(float* out, const float* x) {
    const Offset i = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= TOTAL) return;
    const Offset channel = i / INNER % CHANNELS;
    const Offset first = channel < BEFORE ? 0 : channel - BEFORE;
    const Offset last = channel + AFTER < CHANNELS ? channel + AFTER : CHANNELS - 1;
    float sum = 0.0f;
    for (Offset c = first; c <= last; c++) {
        const float value = x[i + (c - channel) * INNER];
        sum += value * value;
    }
    out[i] = x[i] / divisor(sum);
}
