// Winograd's minimal filtering F(MH x MW, R x S) in four kernels: filters U and inputs V are transformed, their
// products summed over channels as one matrix product to each of the POINTS, and the sums transformed back.
// `filter_h filter_w input_h input_w output_h output_w`, the one-dimensional transforms, are generated before
// this text. The gradient of the input is the same with filters turned round and channels exchanged.

constexpr bool BACK = DIRECTION == DGRAD;
constexpr Offset ROWS = BACK ? CG : KG, DEPTH = BACK ? KG : CG;  // channels out and in, of a group
constexpr Offset IN_H = BACK ? P : H, IN_W = BACK ? Q : W, OUT_H = BACK ? H : P, OUT_W = BACK ? W : Q;
constexpr Offset START_H = BACK ? R - 1 - PAD_TOP : PAD_TOP, START_W = BACK ? S - 1 - PAD_LEFT : PAD_LEFT;
constexpr int AH = MH + static_cast<int>(R) - 1, AW = MW + static_cast<int>(S) - 1, POINTS = AH * AW;
constexpr Offset TILES_H = (OUT_H + MH - 1) / MH, TILES_W = (OUT_W + MW - 1) / MW, TILES = N * TILES_H * TILES_W;
constexpr bool LAST = LAYOUT == NHWC;  // channels are neighbours, in the arrays and in V and M
constexpr long long V_SIZE = ((long long)POINTS * GROUPS * DEPTH * TILES + 63) / 64 * 64;

DEVICE long long matrix(int point, int group, Offset rows, Offset columns) {
    return (long long)(point * GROUPS + group) * rows * columns;
}
DEVICE Offset in_matrix(Offset channel, Offset tile, Offset channels) {
    return LAST ? tile * channels + channel : channel * TILES + tile;
}

// A thread's channel (of all groups) and tile; neighbours in memory go to neighbouring threads.
struct Job {
    int channel;
    Offset tile;
    bool exists;
};
DEVICE Job job(Offset channels) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const Offset inner = static_cast<Offset>(at % (LAST ? channels : TILES));
    const Offset outer = static_cast<Offset>(at / (LAST ? channels : TILES));
    return {static_cast<int>(LAST ? inner : outer), LAST ? outer : inner, at < (long long)channels * TILES};
}


extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) winograd_filter(const T* w, Acc* U) {
    const Offset at = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= GROUPS * ROWS * DEPTH) return;
    const int group = static_cast<int>(at / (ROWS * DEPTH));
    const int row = static_cast<int>(at / DEPTH % ROWS), depth = static_cast<int>(at % DEPTH);
    Acc half[R][AW];
#pragma unroll
    for (int r = 0; r < R; r++) {
        Acc taps[S];
#pragma unroll
        for (int s = 0; s < S; s++)
            taps[s] = Acc(to_float(BACK ? w[w_at(group * KG + depth, row, R - 1 - r, S - 1 - s)]
                                        : w[w_at(group * KG + row, depth, r, s)]));
        filter_w(taps, half[r]);
    }
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc taps[R], points[AH];
#pragma unroll
        for (int r = 0; r < R; r++) taps[r] = half[r][j];
        filter_h(taps, points);
#pragma unroll
        for (int i = 0; i < AH; i++) U[matrix(i * AW + j, group, ROWS, DEPTH) + row * DEPTH + depth] = points[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) winograd_input(const T* x, Acc* workspace) {
    const Job mine = job(GROUPS * DEPTH);
    if (!mine.exists) return;
    const Offset h0 = mine.tile / TILES_W % TILES_H * MH - START_H, v0 = mine.tile % TILES_W * MW - START_W;
    const Offset n = mine.tile / TILES_W / TILES_H;
    Acc half[AH][AW];
#pragma unroll
    for (int i = 0; i < AH; i++) {
        Acc pixels[AW];
#pragma unroll
        for (int j = 0; j < AW; j++) {
            const bool inside = within(h0 + i, IN_H) && within(v0 + j, IN_W);
            const Offset at = BACK ? y_at(n, mine.channel, h0 + i, v0 + j) : x_at(n, mine.channel, h0 + i, v0 + j);
            pixels[j] = inside ? Acc(to_float(x[at])) : Acc(0);
        }
        input_w(pixels, half[i]);
    }
    const int group = mine.channel / static_cast<int>(DEPTH);
    const Offset at = in_matrix(mine.channel % DEPTH, mine.tile, DEPTH);
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc pixels[AH], points[AH];
#pragma unroll
        for (int i = 0; i < AH; i++) pixels[i] = half[i][j];
        input_h(pixels, points);
#pragma unroll
        for (int i = 0; i < AH; i++) workspace[matrix(i * AW + j, group, DEPTH, TILES) + at] = points[i];
    }
}

// M[point, group] = U[point, group] V[point, group]
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, PRODUCT_BLOCKS)
winograd_product(const Acc* U, Acc* workspace) {
    SHARED(Slices, slices);
    const int point = static_cast<int>(blockIdx.z) / GROUPS, group = static_cast<int>(blockIdx.z) % GROUPS;
    const Offset row0 = Offset(blockIdx.y) * BM, tile0 = Offset(blockIdx.x) * BN;
    constexpr int A_RUN = DEPTH % 4 == 0 ? 4 : 1, B_RUN = (LAST ? DEPTH : TILES) % 4 == 0 ? 4 : 1;
    Acc sum[TM][TN] = {};
    multiply_tile<true, A_RUN, LAST, B_RUN>(
        sum, slices, 0, static_cast<int>((DEPTH + BK - 1) / BK), U + matrix(point, group, ROWS, DEPTH),
        workspace + matrix(point, group, DEPTH, TILES),
        [&](int row, Offset k) { return row0 + row < ROWS && k < DEPTH ? (row0 + row) * DEPTH + k : -1; },
        [&](int tile, Offset k) { return tile0 + tile < TILES && k < DEPTH ? in_matrix(k, tile0 + tile, DEPTH) : -1; });
    Acc* M = workspace + V_SIZE + matrix(point, group, ROWS, TILES);
#pragma unroll
    for (int j = 0; j < TN; j++)
#pragma unroll
        for (int i = 0; i < TM; i++) {
            const Offset row = row0 + row_of(i), tile = tile0 + column_of(j);
            if (row < ROWS && tile < TILES) M[in_matrix(row, tile, ROWS)] = sum[i][j];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
winograd_output(const Acc* workspace, T* out, const T* bias, const T* residual) {
    const Job mine = job(GROUPS * ROWS);
    if (!mine.exists) return;
    const Acc* M = workspace + V_SIZE + in_matrix(mine.channel % ROWS, mine.tile, ROWS);
    const int group = mine.channel / static_cast<int>(ROWS);
    Acc half[AH][MW];
#pragma unroll
    for (int i = 0; i < AH; i++) {
        Acc points[AW];
#pragma unroll
        for (int j = 0; j < AW; j++) points[j] = M[matrix(i * AW + j, group, ROWS, TILES)];
        output_w(points, half[i]);
    }
    const Offset h0 = mine.tile / TILES_W % TILES_H * MH, v0 = mine.tile % TILES_W * MW;
    const Offset n = mine.tile / TILES_W / TILES_H;
#pragma unroll
    for (int j = 0; j < MW; j++) {
        Acc points[AH], pixels[MH];
#pragma unroll
        for (int i = 0; i < AH; i++) points[i] = half[i][j];
        output_h(points, pixels);
#pragma unroll
        for (int i = 0; i < MH; i++) {
            if (h0 + i >= OUT_H || v0 + j >= OUT_W) continue;
            const Offset at = BACK ? x_at(n, mine.channel, h0 + i, v0 + j) : y_at(n, mine.channel, h0 + i, v0 + j);
            out[at] = finished(pixels[i], bias, residual, mine.channel, at);
        }
    }
}
