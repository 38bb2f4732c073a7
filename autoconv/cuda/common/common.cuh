// What every kernel shares: where elements lie, the fused epilogue. The extents (N C H W K R S P Q, STRIDE_H ...),
// the types T and Acc and the flags are constants.
#pragma once
#include "../codegen/layer.cuh"

enum Layouts { NCHW, NHWC };
enum Directions { FWD, DGRAD, WGRAD };

constexpr int CG = C / GROUPS;  // channels and filters of one group
constexpr int KG = K / GROUPS;

// Position in `x`, `w` (c within the group) and `y`.
DEVICE Offset x_at(Offset n, int c, Offset h, Offset w) {
    return LAYOUT == NCHW ? ((n * C + c) * H + h) * W + w : ((n * H + h) * W + w) * C + c;
}
DEVICE Offset w_at(Offset k, int c, int r, int s) {
    return LAYOUT == NCHW ? ((k * CG + c) * R + r) * S + s : ((k * R + r) * S + s) * CG + c;
}
DEVICE Offset y_at(Offset n, int k, Offset p, Offset q) {
    return LAYOUT == NCHW ? ((n * K + k) * P + p) * Q + q : ((n * P + p) * Q + q) * K + k;
}

// The output row that filter row r connects with input row h, or a negative number; the same for columns.
DEVICE Offset output_of(Offset h, int r, Offset padding, Offset stride, Offset dilation, Offset extent) {
    const Offset place = h + padding - r * dilation;
    return place % stride == 0 && place / stride < extent ? place / stride : -1;
}

DEVICE bool within(Offset value, Offset extent) { return value >= 0 && value < extent; }

// A position, or a place, so far out that no other part of it brings it back.
constexpr Offset OUTSIDE = -(Offset(1) << (8 * sizeof(Offset) - 2));

// A number type for positions in a matrix of so many elements, which may be larger than any array.
template <bool large>
struct IndexOf {
    using type = Offset;
};
template <>
struct IndexOf<true> {
    using type = long long;
};
template <long long elements>
using Index = typename IndexOf<(elements >= 1ll << 30)>::type;

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Tiles of a matrix in the order in which blocks take them: all rows of a strip of columns, and then the next strip, so
// that blocks which run together meet in the L2.
struct TileAt {
    int row, column;
};
template <int ROWS, int COLUMNS, int STRIP = 8>
DEVICE TileAt tile_at(int index) {
    const int strip = index / (ROWS * STRIP), within = index % (ROWS * STRIP);
    const int width = COLUMNS - strip * STRIP < STRIP ? COLUMNS - strip * STRIP : STRIP;
    return {within / width, strip * STRIP + within % width};
}

template <class Element>
struct Rounded;  // Rounded<T>::from(sum): the accumulator's value in the arrays' type
template <>
struct Rounded<float> {
    DEVICE static float from(float value) { return value; }
};
template <>
struct Rounded<double> {
    DEVICE static double from(double value) { return value; }
};
template <>
struct Rounded<half_t> {
    DEVICE static half_t from(float value) { return to_half(value); }
};
template <>
struct Rounded<bfloat16_t> {
    DEVICE static bfloat16_t from(float value) { return to_bfloat16(value); }
};

// Where the slopes of PReLU begin behind the biases: at once, where there are none.
constexpr Offset SLOPES = BIAS * (DIRECTION == FWD ? K : C);

// y = activation(sum + bias + residual); a NaN passes ReLU and PReLU.
DEVICE T finished(Acc sum, const T* bias, const T* slopes, const T* residual, int k, Offset at) {
    if constexpr (BIAS) sum += to_float(bias[k]);
    if constexpr (RESIDUAL) sum += to_float(residual[at]);
    if constexpr (RELU) sum = sum < Acc(0) ? Acc(0) : sum;
    if constexpr (PRELU) sum = sum < Acc(0) ? sum * to_float(slopes[k]) : sum;
    return Rounded<T>::from(sum);
}
DEVICE T finished(Acc sum, const T* bias, const T* residual, int k, Offset at) {
    return finished(sum, bias, bias + SLOPES, residual, k, at);
}

// Where an element lies in an array, if it is there at all: so far from where its neighbours begin, which for all
// that a thread reads at a time may be the same.
struct Position {
    long long begin, at;
    bool exists;
};
// The position that two parts add up to; either may be `OUTSIDE`.
DEVICE Position sum_of(Offset across, Offset along) { return {across + along, 0, across + along >= 0}; }

// How far into a slice: by what a thread finds once, and further by what the compiler knows.
struct Ahead {
    int first, further;
    DEVICE Ahead(int first_, int further_ = 0) : first(first_), further(further_) {}
    DEVICE operator int() const { return first + further; }
};

// Four neighbours in memory, or one; zeros where there are none.
template <class Element>
DEVICE void load_run(Acc (&to)[1], const Element* from, Position position) {
    to[0] = position.exists ? Acc(to_float((from + position.begin)[position.at])) : Acc(0);
}
template <class Element>
DEVICE void load_run(Acc (&to)[4], const Element* from, Position position) {
    struct alignas(4 * sizeof(Element) < 16 ? 4 * sizeof(Element) : 16) Run {
        Element value[4];
    } run = {};
    if (position.exists) run = aligned<Run>(from + position.begin + position.at);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = Acc(to_float(run.value[i]));
}
DEVICE void read4(Acc* to, const Acc* from) {
    struct alignas(16) Run {
        Acc value[4];
    };
    const Run run = aligned<Run>(from);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = run.value[i];
}
