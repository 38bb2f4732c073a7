// Implicit GEMM: the convolution as a matrix product whose operands are never written down.
//   fwd    y[k, (n,p,q)] = sum over taps (c,r,s) of  w[k, (c,r,s)]   x[(c,r,s), (n,p,q)]
//   dgrad dx[c, (n,h,w)] = sum over taps (k,r,s) of  w[c, (k,r,s)]  dy[(k,r,s), (n,h,w)]
//   wgrad dw[k, (c,r,s)] = sum over places (n,p,q) of dy[k, (n,p,q)] x[(n,p,q), (c,r,s)]
// Rows are the flat operand's lines, columns the pixels'.

#include "../common/operands.cuh"
#include "../common/gemm_tile.cuh"
#include "../common/split.cuh"

constexpr Offset ROWS = FLAT_LINES, COLUMNS = PIXEL_LINES;
constexpr int SLICES = static_cast<int>((DEPTH + BK - 1) / BK);

// Which way neighbours in memory run, and whether four of them are always together, aligned and alike.
constexpr bool A_ALONG_K = DIRECTION == FWD || LAYOUT == NCHW;
constexpr bool SAME_PLACES = TAPS == 1 && STRIDE_H == 1 && STRIDE_W == 1 && UNPADDED;  // of x and y
constexpr int A_RUN = DIRECTION == FWD    ? (DEPTH % 4 == 0 ? 4 : 1)
                      : LAYOUT == NHWC    ? (ROWS % 4 == 0 ? 4 : 1)
                      : DIRECTION == DGRAD ? 1
                                           : (P * Q % 4 == 0 ? 4 : 1);
constexpr int B_RUN = LAYOUT == NHWC ? ((DIRECTION == DGRAD ? KG : CG) % 4 == 0 ? 4 : 1)
                                     : (SAME_PLACES && P * Q % 4 == 0 ? 4 : 1);
// What does not come in runs goes by columns: one column's place to a thread, and no more to remember.
constexpr bool B_ALONG_K = DIRECTION == WGRAD ? LAYOUT == NCHW : B_RUN == 4 && LAYOUT == NHWC;

// What a warp writes at once where neighbours in the output are not together: lines of it, through shared memory, so
// that neighbouring lanes write neighbours.
constexpr int STRIP_LINES = ALONG_FLAT ? 8 : 4, STRIP = ALONG_FLAT ? WARP_M : WARP_N;
struct Strip {
    alignas(16) Acc at[STRIP_LINES][STRIP + 4];
};
static_assert(sizeof(Strip) * (PRODUCT_THREADS / 32) <= sizeof(Slices), "strips take the place of slices");

// Of the block's depth, a share that is summed in one go: a long sum of rounding additions drifts, so that each stretch
// begins at zero and is then added to those before it, which wait in memory. Parts in stretches stay there, in the
// order of the output, for `gemm_sum`: to be summed by the last block they would have to come back to registers, and
// the loop has none to spare.
constexpr int EACH = ceil_div(SLICES, SPLIT), STRETCH = ceil_div(EACH, STRETCHES);
struct Stretch {
    bool first, last;
    Acc* waiting;  // where this part does

    template <int COUNT>
    DEVICE void write(const Acc (&sum)[COUNT], Offset at, int k, const Output& to) const {
        if constexpr (STRETCHES == 1) {
            to.write(sum, at, k);
        } else {
            Run<Acc, COUNT> before = {}, all;
            if (!first) before = aligned<Run<Acc, COUNT>>(waiting + at);
#pragma unroll
            for (int i = 0; i < COUNT; i++) all.value[i] = before.value[i] + sum[i];
            if (SPLIT == 1 && last)
                to.write(all.value, at, k);
            else
                aligned<Run<Acc, COUNT>>(waiting + at) = all;
        }
    }
};

DEVICE void write_strip(const Strip& strip, int i, int group, Offset row0, Offset column0, const Output& to,
                        Stretch stretch) {
    const unsigned thread = launder(threadIdx.x), lane = thread % 32;  // no place is to be found before it is needed
#pragma unroll
    for (int first = 0; first < STRIP_LINES * STRIP; first += 32) {
        const int at = static_cast<int>(first + lane), line = at / STRIP, along = at % STRIP;
        const int across = i / 4 * (ALONG_FLAT ? 32 : 16) + line * 4 + i % 4;
        const Offset row = row0 + warp_row(thread) + (ALONG_FLAT ? along : across);
        const Offset column = column0 + warp_column(thread) + (ALONG_FLAT ? across : along);
        const Acc one[1] = {strip.at[line][along]};
        if (row < ROWS && column < COLUMNS)
            stretch.write(one, output_at(group, column, row), static_cast<int>(group * KG + row), to);
    }
}

DEVICE void write_tile(const Acc (&sum)[TM][TN], Slices& slices, int group, Offset row0, Offset column0,
                       const Output& to, Stretch stretch) {
    const unsigned thread = launder(threadIdx.x), lane = thread % 32;
    Strip& strip = reinterpret_cast<Strip*>(&slices)[thread / 32];
    if constexpr (together(4) < 4) __syncthreads();  // nobody reads slices any more
#pragma unroll
    for (int i = 0; i < (ALONG_FLAT ? TN : TM); i++) {
#pragma unroll
        for (int j = 0; j < (ALONG_FLAT ? TM : TN); j += 4) {
            Run<Acc, 4> four;
#pragma unroll
            for (int e = 0; e < 4; e++) four.value[e] = ALONG_FLAT ? sum[j + e][i] : sum[i][j + e];
            if constexpr (together(4) == 4) {
                const Offset row = row0 + row_of(ALONG_FLAT ? j : i, thread);
                const Offset column = column0 + column_of(ALONG_FLAT ? i : j, thread);
                if (row < ROWS && column < COLUMNS)
                    stretch.write(four.value, output_at(group, column, row), static_cast<int>(group * KG + row), to);
            } else {
                const int line = ALONG_FLAT ? lane % 8 : lane / 8, along = j / 4 * (ALONG_FLAT ? 16 : 32);
                aligned<Run<Acc, 4>>(&strip.at[line][along + (ALONG_FLAT ? lane / 8 : lane % 8) * 4]) = four;
            }
        }
        if constexpr (together(4) < 4) {
            sync_warp();  // the strip is whole
            write_strip(strip, i, group, row0, column0, to, stretch);
            sync_warp();  // and may be written over
        }
    }
}

// A block computes one tile of one group, over one SPLIT-th of the depth.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, PRODUCT_BLOCKS)
gemm(const T* a, const T* b, T* out, const T* bias, const T* residual, Acc* parts, unsigned* tickets) {
    SHARED(Slices, slices);
    const int group = static_cast<int>(blockIdx.z) / SPLIT, part = static_cast<int>(blockIdx.z) % SPLIT;
    const Offset row0 = Offset(blockIdx.y) * BM, column0 = Offset(blockIdx.x) * BN;
    const int first = part * EACH, last = first + EACH < SLICES ? first + EACH : SLICES;
    int slice = first;
    do {
        const int end = slice + STRETCH < last ? slice + STRETCH : last;
        Acc sum[TM][TN] = {};
        if (slice < end)  // else this part has no slices
            multiply_tile<A_ALONG_K, A_RUN, B_ALONG_K, B_RUN, (STRETCH > 1)>(sum, slices, slice, end, b, a, Flat{group},
                                                                             row0, Pixels{group}, column0);
        if constexpr (SPLIT > 1 && STRETCHES == 1) {
            const Share my = share();
            const long long row = my.group * gridDim.y + blockIdx.y;
            const long long tile = launder(static_cast<int>(row * gridDim.x + blockIdx.x));
            const Team<TM * TN, PRODUCT_THREADS> team = {launder(threadIdx.x), 0, parts + tile * (SPLIT * BM * BN),
                                                         tickets + tile * TICKETS};
            if (team.complete(flat<TM * TN>(sum), my.part))
                write_tile(sum, slices, my.group, Offset(launder(blockIdx.y)) * BM, Offset(launder(blockIdx.x)) * BN,
                           {out, bias, residual}, {true, true, nullptr});
        } else {
            write_tile(sum, slices, group, row0, column0, {out, bias, residual},
                       {slice == first, end >= last, parts + part * TOTAL});
        }
        slice = end;
        if constexpr (STRETCHES > 1) __syncthreads();  // nobody reads slices any more, nor strips in their place
    } while (STRETCHES > 1 && slice < last);
}

// The sum of parts in stretches, always in the same order: four elements to a thread, neighbours if they are together.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm_sum(const Acc* parts, T* out, const T* bias, const T* residual) {
    const Output to = {out, bias, residual};
    constexpr int COUNT = together(4);
#pragma unroll
    for (int i = 0; i < 4 / COUNT; i++) {
        const long long at = ((blockIdx.x * (4ll / COUNT) + i) * THREADS + threadIdx.x) * COUNT;
        if (at >= TOTAL) return;
        Acc sum[COUNT] = {};
#pragma unroll 4
        for (int part = 0; part < SPLIT; part++) {
            const auto more = aligned<Run<Acc, COUNT>>(parts + part * TOTAL + at);
#pragma unroll
            for (int e = 0; e < COUNT; e++) sum[e] += more.value[e];
        }
        const Offset position = static_cast<Offset>(at);
        to.write(sum, position, static_cast<int>(LAYOUT == NHWC ? position % K : position / LINE % K));
    }
}
