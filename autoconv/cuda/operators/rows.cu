// What is made of whole rows: reductions, softmax and normalisation. LANES threads share a row, all of a warp or one.

#include "shapes.cuh"

DEVICE float combined(float a, float b, bool maximum) { return maximum ? larger(a, b) : a + b; }

// Of all lanes that share a row.
DEVICE float over_lanes(float value, bool maximum) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) value = combined(value, shuffle_xor(value, mask), maximum);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) reduce(float* out, const float* x) {
    const Offset thread = Offset(blockIdx.x) * THREADS + threadIdx.x, row = thread / LANES, lane = thread % LANES;
    const bool exists = row < OUTPUTS;
    const float* from = x + (exists ? first_of(row) : 0);
    float found = MAXIMUM ? bits_float(0xff800000u) : 0.0f;
    for (Offset j = lane; exists && j < LENGTH; j += LANES) found = combined(found, from[further(j)], MAXIMUM);
    found = over_lanes(found, MAXIMUM);
    if (exists && lane == 0) out[row] = MEAN ? found / static_cast<float>(LENGTH) : found;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) softmax(float* out, const float* x) {
    const Offset thread = Offset(blockIdx.x) * THREADS + threadIdx.x, row = thread / LANES, lane = thread % LANES;
    const bool exists = row < OUTPUTS;
    const Offset first = exists ? first_of(row) : 0;
    float most = bits_float(0xff800000u), sum = 0.0f;
    for (Offset j = lane; exists && j < LENGTH; j += LANES) most = larger(most, x[first + further(j)]);
    most = over_lanes(most, true);
    for (Offset j = lane; exists && j < LENGTH; j += LANES) sum += expf(x[first + further(j)] - most);
    sum = over_lanes(sum, false);
    for (Offset j = lane; exists && j < LENGTH; j += LANES)
        out[first + further(j)] = expf(x[first + further(j)] - most) / sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    normalize(float* out, const float* x, const float* scale, const float* shift) {
    const Offset thread = Offset(blockIdx.x) * THREADS + threadIdx.x, row = thread / LANES, lane = thread % LANES;
    const bool exists = row < OUTPUTS;
    const Offset first = exists ? first_of(row) : 0;
    float mean = 0.0f, squares = 0.0f;
    for (Offset j = lane; CENTRED && exists && j < LENGTH; j += LANES) mean += x[first + further(j)];
    mean = over_lanes(mean, false) / static_cast<float>(LENGTH);
    for (Offset j = lane; exists && j < LENGTH; j += LANES) {
        const float value = x[first + further(j)] - mean;
        squares += value * value;
    }
    const float root = root_of(over_lanes(squares, false) / static_cast<float>(LENGTH));
    for (Offset j = lane; exists && j < LENGTH; j += LANES) {
        float value = (x[first + further(j)] - mean) / root;
        const Offset at = BY_ROW ? row % PERIOD : j;
        if (BY_ELEMENT || BY_ROW) value = value * scale[at] + shift[at];
        out[first + further(j)] = value;
    }
}
