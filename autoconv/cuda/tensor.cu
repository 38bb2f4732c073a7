// Implicit GEMM on the tensor cores, NHWC. Rows times columns, summed over the depth:
//   fwd    y[(n,p,q), k]   = sum over (r,s,c)  of  x[(n,p,q), (r,s,c)]  w[k, (r,s,c)]
//   dgrad dx[(n,h,w), c]   = sum over (r,s,k)  of dy[(n,h,w), (r,s,k)]  w[(r,s,k), c]
//   wgrad dw[k, (r,s,c)]   = sum over (n,p,q)  of dy[(n,p,q), k]        x[(n,p,q), (r,s,c)]
// Sixteen bytes of neighbouring channels travel at once to shared memory, STAGES - 1 slices ahead. Where the
// channels are the depth a slice lies there by rows, where they are not, by depth, and is transposed on its
// way to the registers. Padding is zeros that were never in memory.

constexpr Offset ROWS = DIRECTION == FWD ? N * P * Q : DIRECTION == DGRAD ? N * H * W : KG;
constexpr Offset COLUMNS = DIRECTION == FWD ? KG : DIRECTION == DGRAD ? CG : R * S * CG;
constexpr Offset DEPTH = DIRECTION == FWD ? R * S * CG : DIRECTION == DGRAD ? R * S * KG : N * P * Q;
constexpr int SLICES = static_cast<int>((DEPTH + BK - 1) / BK);
constexpr bool A_BY_ROWS = DIRECTION != WGRAD, B_BY_ROWS = DIRECTION == FWD;

constexpr int RUN = 16 / sizeof(T);                     // values that travel at once
constexpr int STEP = sizeof(T) == 2 ? 16 : 8;           // depth of one matrix instruction
constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;     // tile of a warp
constexpr int FM = WM / 16, FN = WN / 8;                // fragments of it
static_assert(THREADS == WARPS_M * WARPS_N * 32 && WM % 16 == 0 && WN % 16 == 0 && BK % STEP == 0, "whole fragments");

// EXTENT x BK values; rows are padded so that eight of them begin in different banks.
template <int EXTENT, bool BY_ROWS>
struct Slice {
    static constexpr int LINES = BY_ROWS ? EXTENT : BK, LENGTH = BY_ROWS ? BK : EXTENT;
    static constexpr int PAD = BY_ROWS || sizeof(T) == 2 ? RUN : 8;
    alignas(16) T at[LINES][LENGTH + PAD];

    DEVICE T& value(int row, int depth) { return BY_ROWS ? at[row][depth] : at[depth][row]; }

    // `place(row, depth)` is where a run begins in `from`, or negative where it is zero.
    template <class Place>
    DEVICE void fetch(const T* from, Place place) {
        constexpr int TOTAL = LINES * LENGTH / RUN;
#pragma unroll
        for (int i = 0; i < ceil_div(TOTAL, THREADS); i++) {
            const int run = static_cast<int>(threadIdx.x) + i * THREADS;
            if (TOTAL % THREADS && run >= TOTAL) break;
            const int line = run / (LENGTH / RUN), first = run % (LENGTH / RUN) * RUN;
            const Offset start = BY_ROWS ? place(line, first) : place(first, line);
            copy_async16(&at[line][first], from + (start < 0 ? 0 : start), start >= 0);
        }
    }
};

struct Stage {
    Slice<BM, A_BY_ROWS> a;
    Slice<BN, B_BY_ROWS> b;
};
struct Stages {
    Stage at[STAGES];
};

// The channel and filter tap of a position in the order R, S, channels.
struct Tap {
    int channel, r, s;
};
DEVICE Tap tap(Offset index, int channels) {
    const int i = static_cast<int>(index / channels);
    return {static_cast<int>(index % channels), static_cast<int>(i / S), static_cast<int>(i % S)};
}

DEVICE Offset pixel(Offset place, int group, Tap at) {
    const Offset h = place / Q % P * STRIDE_H - PAD_TOP + at.r * DILATION_H;
    const Offset v = place % Q * STRIDE_W - PAD_LEFT + at.s * DILATION_W;
    return within(h, H) && within(v, W) ? x_at(place / (P * Q), group * CG + at.channel, h, v) : -1;
}

DEVICE Offset gradient(Offset place, int group, Tap at) {
    const Offset p = output_of(place / W % H, at.r, PAD_TOP, STRIDE_H, DILATION_H, P);
    const Offset q = output_of(place % W, at.s, PAD_LEFT, STRIDE_W, DILATION_W, Q);
    return p >= 0 && q >= 0 ? y_at(place / (H * W), group * KG + at.channel, p, q) : -1;
}

DEVICE Offset place_a(int group, Offset row, Offset depth) {
    if (row >= ROWS || depth >= DEPTH) return -1;
    if constexpr (DIRECTION == FWD) return pixel(row, group, tap(depth, CG));
    if constexpr (DIRECTION == DGRAD) return gradient(row, group, tap(depth, KG));
    return depth * K + group * KG + row;
}

DEVICE Offset place_b(int group, Offset column, Offset depth) {
    if (column >= COLUMNS || depth >= DEPTH) return -1;
    if constexpr (DIRECTION == FWD) return (group * KG + column) * DEPTH + depth;
    if constexpr (DIRECTION == WGRAD) return pixel(depth, group, tap(column, CG));
    const Tap at = tap(depth, KG);
    return w_at(group * KG + at.channel, static_cast<int>(column), at.r, at.s);
}

// Fragments of the 16 rows (or two times 8 columns) and STEP of depth that begin at (row, depth).
template <bool A, int EXTENT, bool BY_ROWS>
DEVICE void load_fragments(unsigned (&d)[4], Slice<EXTENT, BY_ROWS>& slice, int row, int depth) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(T) == 2) {
        // the four 8x8 matrices go rows first for a, depth first for b
        const int second = lane / 8 % 2 * 8, fourth = lane / 16 * 8;
        T* line = &slice.value(row + (A ? second : fourth) + (BY_ROWS ? lane % 8 : 0),
                               depth + (A ? fourth : second) + (BY_ROWS ? 0 : lane % 8));
        if constexpr (BY_ROWS)
            load_matrices(d, line);
        else
            load_matrices_transposed(d, line);
    } else {  // 32-bit values cannot be transposed on the way: each lane reads its own
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int second = i % 2, fourth = i / 2;
            d[i] = round_tf32(float_bits(to_float(
                slice.value(row + lane / 4 + (A ? second : fourth) * 8, depth + lane % 4 + (A ? fourth : second) * 4))));
        }
    }
}

DEVICE void multiply_stage(float (&sum)[FM][FN][4], Stage& stage, int row, int column) {
#pragma unroll
    for (int depth = 0; depth < BK; depth += STEP) {
        unsigned a[FM][4], b[FN / 2][4];
#pragma unroll
        for (int i = 0; i < FM; i++) load_fragments<true>(a[i], stage.a, row + i * 16, depth);
#pragma unroll
        for (int j = 0; j < FN / 2; j++) load_fragments<false>(b[j], stage.b, column + j * 16, depth);
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
            for (int j = 0; j < FN; j++) {
                const unsigned pair[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                multiply(T{}, sum[i][j], a[i], pair);
            }
    }
}

DEVICE Offset position(int group, Offset row, Offset column) {
    if constexpr (DIRECTION == FWD) return row * K + group * KG + column;
    if constexpr (DIRECTION == DGRAD) return row * C + group * CG + column;
    return (group * KG + row) * COLUMNS + column;
}

// A block computes one tile of one group, over one SPLIT-th of the depth; with SPLIT > 1 the parts go to
// `partial[split, group, row, column]`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tensor(const T* a, const T* b, T* out, const T* bias, const T* residual, float* partial) {
    SHARED_DYNAMIC(Stages, stages);
    const T* first_operand = DIRECTION == WGRAD ? b : a;
    const T* second_operand = DIRECTION == WGRAD ? a : b;
    const int group = static_cast<int>(blockIdx.z) / SPLIT, part = static_cast<int>(blockIdx.z) % SPLIT;
    const Offset row0 = Offset(blockIdx.x) * BM, column0 = Offset(blockIdx.y) * BN;
    constexpr int EACH = ceil_div(SLICES, SPLIT);
    const int first = part * EACH, last = first + EACH < SLICES ? first + EACH : SLICES;
    const auto fetch = [&](int slice) {
        if (slice < last) {
            Stage& stage = stages.at[(slice - first) % STAGES];
            const Offset depth0 = Offset(slice) * BK;
            stage.a.fetch(first_operand, [&](int row, int depth) { return place_a(group, row0 + row, depth0 + depth); });
            stage.b.fetch(second_operand,
                          [&](int column, int depth) { return place_b(group, column0 + column, depth0 + depth); });
        }
        commit_copies();  // an empty group, too, so that the count of groups tells the slice
    };
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp / WARPS_N * WM, column = warp % WARPS_N * WN;
    float sum[FM][FN][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(first + i);
    for (int slice = first; slice < last; slice++) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // the slice is there for all, and the stage before it is free
        fetch(slice + STAGES - 1);
        multiply_stage(sum, stages.at[(slice - first) % STAGES], row, column);
    }
    // nothing is on its way now: what was fetched beyond the last slice are empty groups
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
        for (int j = 0; j < FN; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const Offset y = row0 + row + i * 16 + lane / 4 + e / 2 * 8;
                const Offset x = column0 + column + j * 8 + lane % 4 * 2 + e % 2;
                if (y >= ROWS || x >= COLUMNS) continue;
                if constexpr (SPLIT > 1) {
                    partial[((long long)(part * GROUPS + group) * ROWS + y) * COLUMNS + x] = sum[i][j][e];
                } else {
                    const Offset at = position(group, y, x);
                    out[at] = finished(sum[i][j][e], bias, residual, static_cast<int>(group * KG + x), at);
                }
            }
}

// The sum of the parts, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tensor_sum(const float* partial, T* out, const T* bias, const T* residual) {
    constexpr long long TOTAL = (long long)GROUPS * ROWS * COLUMNS;
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= TOTAL) return;
    float sum = 0;
#pragma unroll 4
    for (int part = 0; part < SPLIT; part++) sum += partial[part * TOTAL + index];
    const int group = static_cast<int>(index / (ROWS * COLUMNS));
    const Offset column = static_cast<Offset>(index % COLUMNS);
    const Offset at = position(group, static_cast<Offset>(index / COLUMNS % ROWS), column);
    out[at] = finished(sum, bias, residual, static_cast<int>(group * KG + column), at);
}
