// Implicit GEMM: the convolution as a matrix product whose operands are never written down.
//   fwd    y[k, (n,p,q)] = sum over taps (c,r,s) of  w[k, (c,r,s)]   x[(c,r,s), (n,p,q)]
//   dgrad dx[c, (n,h,w)] = sum over taps (k,r,s) of  w[c, (k,r,s)]  dy[(k,r,s), (n,h,w)]
//   wgrad dw[k, (c,r,s)] = sum over places (n,p,q) of dy[k, (n,p,q)] x[(n,p,q), (c,r,s)]
// Taps are in the order of memory, so channels come last for NHWC and neighbours in k are neighbours there.

constexpr Offset ROWS = DIRECTION == DGRAD ? CG : KG;
constexpr Offset COLUMNS = DIRECTION == FWD ? N * P * Q : DIRECTION == DGRAD ? N * H * W : CG * R * S;
constexpr Offset DEPTH = DIRECTION == FWD ? CG * R * S : DIRECTION == DGRAD ? KG * R * S : N * P * Q;
constexpr int SLICES = static_cast<int>((DEPTH + BK - 1) / BK);

// Which way neighbours in memory run, and whether four of them are always together, aligned and alike.
constexpr bool A_ALONG_K = DIRECTION == FWD || LAYOUT == NCHW;
constexpr bool FLAT = R * S == 1 && STRIDE_H == 1 && STRIDE_W == 1 && UNPADDED;  // x and y are the same places
constexpr int A_RUN = DIRECTION == FWD    ? (DEPTH % 4 == 0 ? 4 : 1)
                      : LAYOUT == NHWC    ? (ROWS % 4 == 0 ? 4 : 1)
                      : DIRECTION == DGRAD ? 1
                                           : (P * Q % 4 == 0 ? 4 : 1);
constexpr int B_RUN = LAYOUT == NHWC ? ((DIRECTION == DGRAD ? KG : CG) % 4 == 0 ? 4 : 1)
                                     : (FLAT && P * Q % 4 == 0 ? 4 : 1);
// What does not come in runs goes by columns: one column's place to a thread, and no more to remember.
constexpr bool B_ALONG_K = DIRECTION == WGRAD ? LAYOUT == NCHW : B_RUN == 4 && LAYOUT == NHWC;

struct Tap {
    int channel, r, s;
};
DEVICE Tap tap(Offset index, int channels) {
    const int i = static_cast<int>(LAYOUT == NCHW ? index % (R * S) : index / channels);
    return {static_cast<int>(LAYOUT == NCHW ? index / (R * S) : index % channels), static_cast<int>(i / S),
            static_cast<int>(i % S)};
}

struct Place {
    Offset n;
    Offset i, j;
};
DEVICE Place place(Offset index, Offset height, Offset width) {
    return {index / (height * width), index / width % height, index % width};
}

DEVICE Offset pixel(int channel, Place at, Tap tap) {
    const Offset h = at.i * STRIDE_H - PAD_TOP + tap.r * DILATION_H, v = at.j * STRIDE_W - PAD_LEFT + tap.s * DILATION_W;
    return within(h, H) && within(v, W) ? x_at(at.n, channel, h, v) : -1;
}

DEVICE Offset gradient(int channel, Place at, Tap tap) {
    const Offset p = output_of(at.i, tap.r, PAD_TOP, STRIDE_H, DILATION_H, P);
    const Offset q = output_of(at.j, tap.s, PAD_LEFT, STRIDE_W, DILATION_W, Q);
    return p >= 0 && q >= 0 ? y_at(at.n, channel, p, q) : -1;
}

DEVICE Offset place_a(int group, Offset row, Offset k) {
    if (row >= ROWS || k >= DEPTH) return -1;
    if constexpr (DIRECTION == FWD) return (group * KG + row) * DEPTH + k;
    if constexpr (DIRECTION == DGRAD) {
        const Tap at = tap(k, KG);
        return w_at(group * KG + at.channel, static_cast<int>(row), at.r, at.s);
    }
    const Place at = place(k, P, Q);
    return y_at(at.n, static_cast<int>(group * KG + row), at.i, at.j);
}

DEVICE Offset place_b(int group, Offset column, Offset k) {
    if (column >= COLUMNS || k >= DEPTH) return -1;
    if constexpr (DIRECTION == FWD) {
        const Tap at = tap(k, CG);
        return pixel(group * CG + at.channel, place(column, P, Q), at);
    }
    if constexpr (DIRECTION == DGRAD) {
        const Tap at = tap(k, KG);
        return gradient(group * KG + at.channel, place(column, H, W), at);
    }
    const Tap at = tap(column, CG);
    return pixel(group * CG + at.channel, place(k, P, Q), at);
}

// Where the first row of a column lies in the output, and how far apart its rows are.
constexpr Offset ROW_STEP = DIRECTION == WGRAD ? COLUMNS : LAYOUT == NHWC ? 1 : DIRECTION == FWD ? P * Q : H * W;
DEVICE Offset column_start(int group, Offset column) {
    if constexpr (DIRECTION == WGRAD) return group * KG * COLUMNS + column;
    const Place at = DIRECTION == FWD ? place(column, P, Q) : place(column, H, W);
    return DIRECTION == FWD ? y_at(at.n, group * KG, at.i, at.j) : x_at(at.n, group * CG, at.i, at.j);
}

DEVICE void write(T* out, const T* bias, const T* residual, int group, Offset row, Offset start, Acc sum) {
    const Offset position = start + row * ROW_STEP;
    out[position] = finished(sum, bias, residual, static_cast<int>(group * KG + row), position);
}

// A block computes one tile of one group, over one SPLIT-th of the depth; with SPLIT > 1 the parts go to
// `partial[split, group, row, column]`.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, PRODUCT_BLOCKS)
gemm(const T* a, const T* b, T* out, const T* bias, const T* residual, Acc* partial) {
    SHARED(Slices, slices);
    const int group = static_cast<int>(blockIdx.z) / SPLIT, part = static_cast<int>(blockIdx.z) % SPLIT;
    const Offset row0 = Offset(blockIdx.y) * BM, column0 = Offset(blockIdx.x) * BN;
    constexpr int EACH = ceil_div(SLICES, SPLIT);
    const int first = part * EACH, last = first + EACH < SLICES ? first + EACH : SLICES;
    Acc sum[TM][TN] = {};
    multiply_tile<A_ALONG_K, A_RUN, B_ALONG_K, B_RUN>(
        sum, slices, first, last, b, a,
        [&](int row, Offset k) { return place_a(group, row0 + row, k); },
        [&](int column, Offset k) { return place_b(group, column0 + column, k); });
#pragma unroll
    for (int j = 0; j < TN; j++) {
        const Offset column = column0 + column_of(j);
        if (column >= COLUMNS) continue;
        const Offset start = SPLIT == 1 ? column_start(group, column) : column;
#pragma unroll
        for (int i = 0; i < TM; i++) {
            const Offset row = row0 + row_of(i);
            if (row >= ROWS) continue;
            if constexpr (SPLIT == 1)
                write(out, bias, residual, group, row, start, sum[i][j]);
            else
                partial[((long long)(part * GROUPS + group) * ROWS + row) * COLUMNS + start] = sum[i][j];
        }
    }
}

// The sum of the parts, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm_sum(const Acc* partial, T* out, const T* bias, const T* residual) {
    constexpr long long TOTAL = (long long)GROUPS * ROWS * COLUMNS;
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= TOTAL) return;
    Acc sum = 0;
#pragma unroll 4
    for (int part = 0; part < SPLIT; part++) sum += partial[part * TOTAL + at];
    const int group = static_cast<int>(at / (ROWS * COLUMNS));
    const Offset start = column_start(group, static_cast<Offset>(at % COLUMNS));
    write(out, bias, residual, group, static_cast<Offset>(at / COLUMNS % ROWS), start, sum);
}
