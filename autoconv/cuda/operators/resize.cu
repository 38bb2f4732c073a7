// Along one axis, weighted sums of TAPS elements, whose places and weights stand in two tables.

#include "shapes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
resize(float* out, const float* x, const int* places, const float* weights) {
    const Offset i = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= TOTAL) return;
    const Offset place = i / INNER % NEW, line = i / INNER / NEW * OLD;
    float sum = 0.0f;
    for (int t = 0; t < TAPS; t++)
        sum += weights[place * TAPS + t] * x[(line + places[place * TAPS + t]) * INNER + i % INNER];
    out[i] = sum;
}
