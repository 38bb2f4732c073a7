// The forward direction and the gradient of the input on the same terms: what is read, and what is written. With
// unit stride the gradient is the same sum, its filters rotated by 180 degrees and channels exchanged.
#pragma once
#include "common.cuh"

constexpr bool BACK = DIRECTION == DGRAD, LAST = LAYOUT == NHWC;                 // LAST: channels are neighbours
constexpr Offset ROWS = BACK ? CG : KG, DEPTH = BACK ? KG : CG;                  // channels out and in, of a group
constexpr Offset IN_H = BACK ? P : H, IN_W = BACK ? Q : W, OUT_H = BACK ? H : P, OUT_W = BACK ? W : Q;
constexpr Offset START_H = BACK ? (R - 1) * DILATION_H - PAD_TOP : PAD_TOP;      // padding before the image
constexpr Offset START_W = BACK ? (S - 1) * DILATION_W - PAD_LEFT : PAD_LEFT;

DEVICE Offset in_at(Offset n, int channel, Offset h, Offset w) {
    return BACK ? y_at(n, channel, h, w) : x_at(n, channel, h, w);
}
DEVICE Offset out_at(Offset n, int channel, Offset h, Offset w) {
    return BACK ? x_at(n, channel, h, w) : y_at(n, channel, h, w);
}
DEVICE Offset filter_at(int group, int row, int depth, int r, int s) {
    return BACK ? w_at(group * KG + depth, row, r, s) : w_at(group * KG + row, depth, r, s);
}

// RUN neighbouring channels of the output, finished and stored at once.
template <int RUN>
DEVICE void write_channels(const Acc* sum, int channel, Offset place, T* out, const T* bias, const T* residual) {
    struct alignas(RUN * sizeof(T) < 16 ? RUN * sizeof(T) : 16) Run {
        T value[RUN];
    } run;
#pragma unroll
    for (int i = 0; i < RUN; i++) run.value[i] = finished(sum[i], bias, residual, channel + i, place + i);
    aligned<Run>(out + place) = run;
}
