// Direct convolution of few channels on tensor cores. A block has the filters of BM channels in shared memory and takes one
// tile of outputs after the other, BQ columns wide, a warp 32 of them. It brings the pixels that a tile meets, in quads of
// channels, and multiplies them tap by tap where they lie. There is nothing to be had from a cache but the halo, and while
// one block waits for its pixels the others of a multiprocessor multiply.

#include "tensor.cuh"

constexpr int PIXELS = 4, WARP_PIXELS = PIXELS * GROUP;            // groups of a warp's pixels, and what they are together
constexpr int WARP_ROWS = WARP_PIXELS / BQ, ROWS = WARP_ROWS * WARPS;  // of outputs, to a warp and to a tile
constexpr int SPAN_H = (ROWS - 1) * static_cast<int>(STRIDE_H) + static_cast<int>(R - 1) * static_cast<int>(DILATION_H) + 1;
constexpr int SPAN_W = (BQ - 1) * static_cast<int>(STRIDE_W) + static_cast<int>(S - 1) * static_cast<int>(DILATION_W) + 1;
constexpr int SPOTS = SPAN_H * SPAN_W, PLACES = QUADS * SPOTS;  // quads of all channels that a tile meets
constexpr Offset TILES_P = (P + ROWS - 1) / ROWS, TILES_Q = (Q + BQ - 1) / BQ, TILES = N * TILES_P * TILES_Q;
static_assert(WARP_PIXELS % BQ == 0 && BQ % (2 * GROUP) == 0 && PIXELS % TOGETHER == 0, "whole rows and runs");

struct Shared {
    Fragment filters[FRAGMENTS];
    int entry[STEPS * 4];  // how far a tap's quad is from that of tap 0
    Quad pixels[PARTS][PLACES];
};

struct TilePlace {
    Offset n, p, q;
};
DEVICE TilePlace tile_place(Offset index) {
    const Place at = place(index, TILES_P, TILES_Q);
    return {at.n, at.i * ROWS, at.j * BQ};
}

// Four channels of a pixel, zeros beyond the border.
DEVICE void load_quad(T (&value)[QUAD], const T* x, const TilePlace& tile, int at) {
    const int c0 = at / SPOTS * QUAD, spot = at % SPOTS;
    const Offset h = tile.p * STRIDE_H - PAD_TOP + spot / SPAN_W, v = tile.q * STRIDE_W - PAD_LEFT + spot % SPAN_W;
    const bool exists = at < PLACES && within(h, H) && within(v, W);
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        const bool real = exists && (C % QUAD == 0 || c0 + i < C);
        value[i] = real ? x[x_at(tile.n, c0 + i, h, v)] : T{};
    }
}

// The pixels of a tile, so many to a thread at a time as are on their way together.
DEVICE void bring(Shared& shared, const T* x, const TilePlace& tile) {
    constexpr int COUNT = ceil_div(PLACES, THREADS), HELD = ceil_div(COUNT, ceil_div(COUNT, 6));
#pragma unroll 1
    for (int first = 0; first < COUNT; first += HELD) {
        T value[HELD][QUAD];
#pragma unroll
        for (int i = 0; i < HELD; i++)
            load_quad(value[i], x, tile, (first + i) * THREADS + static_cast<int>(threadIdx.x));
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int at = (first + i) * THREADS + static_cast<int>(threadIdx.x);
            Quad quad[PARTS];
            split(quad, value[i]);
            if (at < PLACES) {
#pragma unroll
                for (int p = 0; p < PARTS; p++) shared.pixels[p][at] = quad[p];
            }
        }
    }
}

// Which of a warp's 32 pixels is number `at` of a group, and where its quad of tap 0 lies.
DEVICE constexpr int pixel_of(int group, int at) { return FILTER_ROWS ? column_of(group, at) : row_of(group, at); }
DEVICE constexpr int spot_of(int pixel) {
    return pixel / BQ * static_cast<int>(STRIDE_H) * SPAN_W + pixel % BQ * static_cast<int>(STRIDE_W);
}

// Sixteen filters times all pixels, of one part each. Where their sums then are, `write_tile` knows.
DEVICE void multiply_pair(float (&sum)[PIXELS][4], const Fragment& filters, const Quad (&pixels)[PIXELS]) {
#pragma unroll
    for (int m = 0; m < PIXELS; m++) {
        if constexpr (FILTER_ROWS) {
            const unsigned b[2] = {pixels[m].word[0], pixels[m].word[1]};
            multiply(Part{}, sum[m], filters.word, b);
        } else {
            const Quad &upper = pixels[m / 2 * 2], &lower = pixels[m / 2 * 2 + 1];
            const unsigned a[4] = {upper.word[0], lower.word[0], upper.word[1], lower.word[1]};
            const unsigned b[2] = {filters.word[m % 2 * 2], filters.word[m % 2 * 2 + 1]};
            multiply(Part{}, sum[m], a, b);
        }
    }
}

using Sums = float[PAIRS][PIXELS][4];

DEVICE void multiply_tile(Sums& sum, const Shared& shared, int lane, int from) {
#pragma unroll(PARTS > 1 ? 1 : STEPS <= 4 ? STEPS : 2)
    for (int step = 0; step < STEPS; step++) {
        const int at = from + shared.entry[4 * step + lane % 4];
        const bool exists = 4 * step + 3 < ENTRIES || 4 * step + lane % 4 < ENTRIES;
        Quad pixels[PARTS][PIXELS];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int m = 0; m < PIXELS; m++) {
                pixels[p][m] = shared.pixels[p][at + spot_of(pixel_of(m, 0))];
                if (!exists) pixels[p][m] = {};  // a filter's zero is no zero times infinity
            }
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            if constexpr (PARTS == 1) {
                multiply_pair(sum[pair], shared.filters[fragment_at(0, step, pair, lane)], pixels[0]);
            } else {
                Fragment filters[PARTS];
#pragma unroll
                for (int p = 0; p < PARTS; p++) filters[p] = shared.filters[fragment_at(p, step, pair, lane)];
                float some[PIXELS][4] = {};
#pragma unroll
                for (int smaller = PARTS - 1; smaller >= 0; smaller--)  // products about as small as that part come first
#pragma unroll
                    for (int p = 0; p <= smaller; p++) multiply_pair(some, filters[p], pixels[smaller - p]);
#pragma unroll
                for (int m = 0; m < PIXELS; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum[pair][m][e] += some[m][e];
            }
        }
    }
}

DEVICE constexpr int neighbours(Offset line, int most) { return line % most == 0 ? most : neighbours(line, most / 2); }

// RUN neighbours of a line of the output, of filter k at most COUNT at once, as far as there are so many.
DEVICE void write_run(const float (&value)[RUN], const TilePlace& tile, int pixel, int k, const Output& to) {
    constexpr int COUNT = neighbours(FILTER_ROWS ? Q : K, RUN);
    const Offset p = tile.p + pixel / BQ, q = tile.q + pixel % BQ;
    if (p >= P || k >= K) return;
#pragma unroll
    for (int first = 0; first < RUN; first += COUNT) {
        float some[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; e++) some[e] = value[first + e];
        if (FILTER_ROWS ? q + first < Q : q < Q && k + first < K) {
            const int filter = FILTER_ROWS ? k : k + first;
            to.write(some, y_at(tile.n, filter, p, FILTER_ROWS ? q + first : q), filter);
        }
    }
}

DEVICE void write_tile(const Sums& sum, const TilePlace& tile, int warp, int lane, int k0, const Output& to) {
#pragma unroll
    for (int row = 0; row < (FILTER_ROWS ? 2 * PAIRS : PIXELS); row++)  // groups of rows
#pragma unroll
        for (int first = 0; first < (FILTER_ROWS ? PIXELS : 2 * PAIRS); first += TOGETHER) {
            float value[RUN];
#pragma unroll
            for (int e = 0; e < RUN; e++) {
                const int column = first + e / 2, half = row % 2 * 2 + e % 2;
                value[e] = FILTER_ROWS ? sum[row / 2][column][half] : sum[column / 2][row / 2 * 2 + column % 2][half];
            }
            const int across = row_of(row, lane / 4), along = column_of(first, lane % 4 * 2);
            write_run(value, tile, warp * WARP_PIXELS + (FILTER_ROWS ? along : across), k0 + (FILTER_ROWS ? across : along),
                      to);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
direct_tensor(const T* x, const Fragment* U, T* out, const T* bias, const T* residual) {
    SHARED_DYNAMIC(Shared, shared);
    const int block = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < FRAGMENTS; i += THREADS) copy_async16(&shared.filters[i], U + block * FRAGMENTS + i, true);
    commit_copies();
    for (int i = thread; i < 4 * STEPS; i += THREADS) {
        const int tap = i / QUADS % static_cast<int>(R * S);  // quads beyond the last tap read what they do not use
        const int r = tap / static_cast<int>(S), s = tap % static_cast<int>(S);
        const int spot = r * static_cast<int>(DILATION_H) * SPAN_W + s * static_cast<int>(DILATION_W);
        shared.entry[i] = spot + i % QUADS * SPOTS;
    }
    wait_copies<0>();
    const int lane = thread % 32, warp = thread / 32;
    const int from = spot_of(warp * WARP_PIXELS) + spot_of(pixel_of(0, lane / 4));
    for (Offset index = blockIdx.x; index < TILES; index += gridDim.x) {
        const TilePlace tile = tile_place(index);
        __syncthreads();  // nobody reads the last tile's pixels any more
        bring(shared, x, tile);
        __syncthreads();
        Sums sum = {};
        multiply_tile(sum, shared, lane, from);
        write_tile(sum, tile, warp, lane, block * BM, {out, bias, residual});
    }
}
