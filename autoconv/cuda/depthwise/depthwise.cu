// Depthwise convolution: every filter sees one channel, so there is no sum over channels to tile, and memory
// sets the pace. A thread computes TQ neighbouring outputs of a row from one window of inputs in registers.

#include "../common/common.cuh"

constexpr bool BACK = DIRECTION == DGRAD;
constexpr Offset CHANNELS = BACK ? C : K, ROWS = BACK ? H : P, COLUMNS = BACK ? W : Q;
constexpr Offset RUNS = (COLUMNS + TQ - 1) / TQ;
constexpr int STEP = BACK ? 1 : static_cast<int>(STRIDE_W);  // inputs between two outputs
constexpr int WINDOW = (TQ - 1) * STEP + (S - 1) * DILATION_W + 1;
constexpr bool IN_REGISTERS = WINDOW <= 64 && !(BACK && STRIDE_W > 1);

// Input columns that tap s of output column j meets, or -1.
DEVICE Offset column_of(Offset j, int s) {
    if constexpr (BACK) return output_of(j, s, PAD_LEFT, STRIDE_W, DILATION_W, Q);
    const Offset v = j * STRIDE_W - PAD_LEFT + s * DILATION_W;
    return within(v, W) ? v : -1;
}

DEVICE Offset row_of(Offset i, int r) {
    if constexpr (BACK) return output_of(i, r, PAD_TOP, STRIDE_H, DILATION_H, P);
    const Offset h = i * STRIDE_H - PAD_TOP + r * DILATION_H;
    return within(h, H) ? h : -1;
}

DEVICE Offset input_at(Offset n, int channel, Offset row, Offset column) {
    return BACK ? y_at(n, channel, row, column) : x_at(n, channel, row, column);
}

// sum[j] += row r of filter `k` over row `row` of its input channel
DEVICE void add_row(Acc (&sum)[TQ], const T* in, const T* w, Offset n, int k, int r, Offset row, Offset first) {
    const int channel = BACK ? k : k / KG;
    Acc tap[S];
#pragma unroll
    for (int s = 0; s < S; s++) tap[s] = Acc(to_float(w[w_at(k, 0, r, s)]));
    if constexpr (IN_REGISTERS) {
        const Offset start = BACK ? first + PAD_LEFT - (S - 1) * DILATION_W : first * STRIDE_W - PAD_LEFT;
        Acc window[WINDOW];
#pragma unroll
        for (int i = 0; i < WINDOW; i++)
            window[i] = within(start + i, BACK ? Q : W) ? Acc(to_float(in[input_at(n, channel, row, start + i)])) : Acc(0);
#pragma unroll
        for (int s = 0; s < S; s++)
#pragma unroll
            for (int j = 0; j < TQ; j++) sum[j] += window[j * STEP + s * DILATION_W] * tap[BACK ? S - 1 - s : s];
    } else {
#pragma unroll
        for (int s = 0; s < S; s++)
#pragma unroll
            for (int j = 0; j < TQ; j++) {
                const Offset column = column_of(first + j, s);
                if (column >= 0) sum[j] += Acc(to_float(in[input_at(n, channel, row, column)])) * tap[s];
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
depthwise(const T* in, const T* w, T* out, const T* bias, const T* residual) {
    const Offset at = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= N * CHANNELS * ROWS * RUNS) return;
    const Offset inner = LAYOUT == NCHW ? at : at / CHANNELS;  // neighbouring threads are neighbours in memory
    const Offset first = inner % RUNS * TQ, i = inner / RUNS % ROWS, rest = inner / RUNS / ROWS;
    const int channel = static_cast<int>(LAYOUT == NCHW ? rest % CHANNELS : at % CHANNELS);
    const Offset n = LAYOUT == NCHW ? rest / CHANNELS : rest;
    Acc sum[TQ] = {};
    for (int r = 0; r < R; r++) {
        const Offset row = row_of(i, r);
        if (row < 0) continue;
        if constexpr (BACK)
            for (int k = channel * KG; k < (channel + 1) * KG; k++) add_row(sum, in, w, n, k, r, row, first);
        else
            add_row(sum, in, w, n, channel, r, row, first);
    }
#pragma unroll
    for (int j = 0; j < TQ; j++) {
        if (first + j >= COLUMNS) continue;
        if constexpr (BACK) {
            out[x_at(n, channel, i, first + j)] = Rounded<T>::from(sum[j]);
        } else {
            const Offset position = y_at(n, channel, i, first + j);
            out[position] = finished(sum[j], bias, residual, channel, position);
        }
    }
}
