// What every kernel shares: where elements lie, the fused tail. The extents (N C H W K R S P Q, STRIDE_H ...),
// the types T and Acc and the flags stand before this text as constants: see `source.py`.
#pragma once

enum Layouts { NCHW, NHWC };
enum Directions { FWD, DGRAD, WGRAD };

constexpr int CG = C / GROUPS;  // channels and filters of one group
constexpr int KG = K / GROUPS;

// Position in `x`, `w` (c within the group) and `y`.
DEVICE Offset x_at(Offset n, int c, int h, int w) {
    return LAYOUT == NCHW ? ((n * C + c) * H + h) * W + w : ((n * H + h) * W + w) * C + c;
}
DEVICE Offset w_at(Offset k, int c, int r, int s) {
    return LAYOUT == NCHW ? ((k * CG + c) * R + r) * S + s : ((k * R + r) * S + s) * CG + c;
}
DEVICE Offset y_at(Offset n, int k, int p, int q) {
    return LAYOUT == NCHW ? ((n * K + k) * P + p) * Q + q : ((n * P + p) * Q + q) * K + k;
}

DEVICE bool within(int value, int extent) { return static_cast<unsigned>(value) < static_cast<unsigned>(extent); }

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// y = activation(sum + bias + residual); a NaN passes ReLU.
DEVICE T finished(Acc sum, const T* bias, const T* residual, int k, Offset at) {
    if constexpr (BIAS) sum += to_float(bias[k]);
    if constexpr (RESIDUAL) sum += to_float(residual[at]);
    if constexpr (RELU) sum = sum < Acc(0) ? Acc(0) : sum;
    return Rounded<T>::from(sum);
}
