// Winograd's minimal filtering in one kernel: nothing transformed is ever written to memory, but the filters.
// A block computes BM channels of BN tiles; its warps share out the POINTS, each of which is a matrix product
// of its own, BC channels deep at a time. Filters arrive by asynchronous copies while the slice before is
// multiplied, pixels through registers; rows of tiles are transformed on their way into shared memory, columns
// there in place. At the end points meet again in shared memory, eight channels at a time.
//
// Packed filters are U[group, block of rows, channel, point, BM], filled up with zeros: a slice is one piece of
// memory. Of each BM the place 32 a + 4 b + c holds row 8 (4 a + c) + b: what a thread reads at once lies together,
// and so do the eight rows that a warp has in one register, for stores with channels last.

#include "filtered.cuh"

constexpr int WARPS = FUSED_THREADS / 32, EACH = POINTS / WARPS, TM = BM / 8, TN = BN / 4;
constexpr int SLICES = ceil_div(static_cast<int>(DEPTH), BC), ROW_BLOCKS = ceil_div(static_cast<int>(ROWS), BM);
constexpr int COUNT = BN * BC * AH / FUSED_THREADS;  // rows of tiles to a thread and slice, and columns of them
constexpr int FILTERS = BC * POINTS * BM;            // values of a slice of filters
static_assert(AH == AW && POINTS % WARPS == 0 && COUNT * FUSED_THREADS == BN * BC * AH && BC % COUNT == 0, "evenly shared");
static_assert(FILTERS % (4 * FUSED_THREADS) == 0 && TM % 4 == 0 && TN % 4 == 0, "whole 128-bit words");
static_assert(BC * BM % THREADS == 0, "no thread of fused_filter has nothing to do");

struct Slices {  // paddings spread over the banks what lanes store together: channels, where they come last
    alignas(16) Acc u[2][BC][POINTS][BM];
    alignas(16) Acc v[2][POINTS][BC][LAST ? BN + 32 / BC : BN];
};
struct Sums {
    alignas(16) Acc m[POINTS][8][LAST ? BN + 4 : BN % 32 ? BN : BN + 16];
};
struct alignas(16) Quad {
    Acc value[4];
};
union Shared {
    Slices slices;
    Sums sums;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fused_filter(const T* w, Acc* U) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const int place = static_cast<int>(at % BM), depth = static_cast<int>(at / BM % (SLICES * BC));
    const int block = static_cast<int>(at / BM / (SLICES * BC));
    const int row = block % ROW_BLOCKS * BM + 8 * (place / 32 * 4 + place % 4) + place % 32 / 4;
    Acc* points = U + at / BM * POINTS * BM + place;
    if (row < ROWS && depth < DEPTH)
        transform_filter(w, block / ROW_BLOCKS, row, depth, [&](int point, Acc value) { points[point * BM] = value; });
    else
        for (int point = 0; point < POINTS; point++) points[point * BM] = 0;
}

// Every place below is found again in each slice: it costs less than the registers to remember it in.
DEVICE int this_thread() { return launder(threadIdx.x); }

// A thread's share of a slice: one row, or column, of one tile in COUNT neighbouring channels.
struct Share {
    int tile, line, c;
};
DEVICE Share share(bool channels_first) {
    constexpr int PARTS = BC / COUNT;
    const int thread = this_thread();
    return channels_first ? Share{thread / PARTS % BN, thread / PARTS / BN, thread % PARTS * COUNT}
                          : Share{thread % BN, thread / BN % AH, thread / (BN * AH) * COUNT};
}

struct Pixels {
    const T* from;    // the row's first pixel in the slice's first channel
    unsigned inside;  // which of its pixels are in the image
    Acc value[COUNT][AW];

    DEVICE Pixels(const T* x, Offset tile0, int group) {
        const Share mine = share(LAST);
        const Corner first = corner(tile0 + mine.tile);
        const Offset h = first.h - START_H + mine.line, v = first.w - START_W;
        from = x + in_at(first.n, static_cast<int>(group * DEPTH) + mine.c, h, v);
        inside = 0;
        if (tile0 + mine.tile < TILES && within(h, IN_H))
#pragma unroll
            for (int j = 0; j < AW; j++) inside |= within(v + j, IN_W) ? 1u << j : 0u;
    }

    DEVICE void fetch(int slice) {
        const int c = slice * BC + share(LAST).c;
        constexpr Offset CHANNEL = LAST ? 1 : IN_H * IN_W, PIXEL = LAST ? Offset(GROUPS) * DEPTH : 1;
#pragma unroll
        for (int j = 0; j < AW; j++) {
            const bool wanted = inside >> j & 1u;
            if constexpr (LAST && DEPTH % BC == 0) {  // COUNT neighbours at once
                struct alignas(COUNT * sizeof(T)) Run {
                    T value[COUNT];
                } run = {};
                if (wanted) run = aligned<Run>(from + j * PIXEL);
#pragma unroll
                for (int n = 0; n < COUNT; n++) value[n][j] = Acc(to_float(run.value[n]));
            } else {
#pragma unroll
                for (int n = 0; n < COUNT; n++) {
                    const bool exists = wanted && (DEPTH % BC == 0 || c + n < DEPTH);
                    value[n][j] = exists ? Acc(to_float(from[j * PIXEL + n * CHANNEL])) : Acc(0);
                }
            }
        }
        from += BC * CHANNEL;
    }

    DEVICE void store(Slices& to, int half) const {
        const Share mine = share(LAST);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            Acc points[AW];
            input_w(value[n], points);
#pragma unroll
            for (int j = 0; j < AW; j++) to.v[half][mine.line * AW + j][mine.c + n][mine.tile] = points[j];
        }
    }
};

DEVICE void transform_columns(Slices& slices, int half) {
    const Share mine = share(false);
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        Acc values[AH], points[AH];
#pragma unroll
        for (int i = 0; i < AH; i++) values[i] = slices.v[half][i * AW + mine.line][mine.c + n][mine.tile];
        input_h(values, points);
#pragma unroll
        for (int i = 0; i < AH; i++) slices.v[half][i * AW + mine.line][mine.c + n][mine.tile] = points[i];
    }
}

DEVICE void copy_filters(Slices& to, const Acc* slice, int half) {
    const int thread = this_thread();
#pragma unroll
    for (int n = 0; n < FILTERS / (4 * FUSED_THREADS); n++) {
        const int at = 4 * (thread + n * FUSED_THREADS);
        copy_async16(&to.u[half][0][0][0] + at, slice + at, true);
    }
    commit_copies();
}

#if __CUDA_ARCH__ >= 1000
constexpr int AHEAD = 1;  // with more, Blackwell's compiler runs out of registers
#else
constexpr int AHEAD = 2;
#endif
// Lanes are 8 by 4: no bank conflicts, since each quarter of a warp reads two and four 128-bit words.
DEVICE void multiply_slice(Acc (&sum)[EACH][TM][TN], const Slices& slices, int half) {
    const int thread = this_thread(), lane = thread % 32, first = thread / 32 * EACH;
#pragma unroll AHEAD
    for (int c = 0; c < BC; c++)
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            Acc a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; i += 4) read4(&a[i], &slices.u[half][c][first + p][i * 8 + lane / 4 * 4]);
#pragma unroll
            for (int j = 0; j < TN; j += 4) read4(&b[j], &slices.v[half][first + p][c][j * 4 + lane % 4 * 4]);
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) sum[p][i][j] += a[i] * b[j];
        }
}

extern "C" __global__ void __launch_bounds__(FUSED_THREADS, FUSED_BLOCKS)
winograd_fused(const T* x, const Acc* U, T* out, const T* bias, const T* residual) {
    SHARED_DYNAMIC(Shared, shared);
    Slices& slices = shared.slices;
    Sums& sums = shared.sums;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int group = blockIdx.z, block = static_cast<int>(blockIdx.x) % ROW_BLOCKS;  // neighbours share pixels
    const Offset tile0 = static_cast<Offset>(blockIdx.x) / ROW_BLOCKS * BN;
    const Acc* filters = U + (long long)(group * ROW_BLOCKS + block) * SLICES * FILTERS;
    Pixels pixels(x, tile0, group);
    Acc sum[EACH][TM][TN] = {};
    pixels.fetch(0);
    copy_filters(slices, filters, 0);
#pragma unroll 1
    for (int slice = 0; slice < launder(SLICES); slice++) {
        const int half = slice & 1;
        pixels.store(slices, half);
        __syncthreads();
        transform_columns(slices, half);
        wait_copies<0>();
        __syncthreads();
        if (slice + 1 < launder(SLICES)) {
            pixels.fetch(slice + 1);
            copy_filters(slices, filters + (long long)(slice + 1) * FILTERS, half ^ 1);
        }
        multiply_slice(sum, slices, half);
    }
#pragma unroll
    for (int i = 0; i < TM; i++) {
        __syncthreads();
#pragma unroll
        for (int p = 0; p < EACH; p++)
#pragma unroll
            for (int j = 0; j < TN; j += 4) {
                const Quad quad = {{sum[p][i][j], sum[p][i][j + 1], sum[p][i][j + 2], sum[p][i][j + 3]}};
                aligned<Quad>(&sums.m[warp * EACH + p][lane / 4][j * 4 + lane % 4 * 4]) = quad;
            }
        __syncthreads();
        for (int job = launder(thread); job < 8 * BN; job += FUSED_THREADS) {
            const int tile = LAST ? job / 8 : job % BN, channel = LAST ? job % 8 : job / BN;
            const int row = block * BM + i * 8 + channel;
            if (row < ROWS && tile0 + tile < TILES)
                write_tile([&](int point) { return sums.m[point][channel][tile]; },
                           static_cast<int>(group * ROWS) + row, tile0 + tile, out, bias, residual);
        }
    }
}
