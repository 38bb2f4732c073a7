// Convolution as it is defined, tile by tile. A block computes BM channels of LANES_N images, LANES_P rows and
// LANES_Q runs of TQ neighbours in a row; a thread TK channels of one run. BK channels in at a time lie in shared
// memory, filters and all pixels that the tile sees, zeros beyond the border; the next ones arrive while these are
// multiplied. A thread reads a row of pixels once for all taps of a filter row, and a warp's threads read the same
// filters.
//
// Taps a PERIOD apart meet the same pixels, SHIFT outputs away from each other: pixels lie in polyphase COMPONENTS, by
// the tap that meets them first, so that neighbouring outputs read neighbours whatever the stride, and what no tap meets
// is left out. With TQ odd, lines of PITCH numbers and images of IMAGE, a warp's lanes mostly read from banks of their own.
//
// The image is an array or a texture, whose border mode fills in the zeros on both sides of a row; a row above or
// below the image is one beyond all of the texture.
//
// Packed filters are U[group, block of rows, channel, r, s, BM], filled up with zeros: a slice is one piece of
// memory.
#pragma once
#include "../common/sides.cuh"

constexpr int WARPS = TILE_THREADS / 32, WARPS_M = BM / TK;
constexpr int RUNS = LANES_N * LANES_P * LANES_Q;
constexpr int STEP_H = BACK ? 1 : static_cast<int>(STRIDE_H), STEP_W = BACK ? 1 : static_cast<int>(STRIDE_W);
constexpr int LINES = COMPONENTS_H * SPAN_H, WIDTH = COMPONENTS_W * SPAN_W, SPOTS = LANES_N * LINES * WIDTH;
constexpr int COUNT = ceil_div(SPOTS, TILE_THREADS);
constexpr int TAPS = static_cast<int>(R * S), FILTERS = BK * TAPS * BM, WINDOW = SPAN_W - (LANES_Q - 1) * TQ;
constexpr int SLICES = ceil_div(static_cast<int>(DEPTH), BK), ROW_BLOCKS = ceil_div(static_cast<int>(ROWS), BM);
constexpr Offset TILES_P = (OUT_H + LANES_P - 1) / LANES_P, TILES_Q = (OUT_W + LANES_Q * TQ - 1) / (LANES_Q * TQ);
constexpr Offset CHANNEL_IN = LAST ? 1 : IN_H * IN_W, CHANNEL_OUT = LAST ? 1 : OUT_H * OUT_W;
constexpr int ROUND = 4;                                  // channels that leave through shared memory together
constexpr int HELD = COUNT * BK <= 16 ? COUNT : 16 / BK;  // spots that wait in registers
constexpr int UNROLLED = TAPS * TQ * TK <= 600 ? static_cast<int>(R) : 1;
static_assert(TILE_THREADS % (32 * WARPS_M) == 0 && RUNS <= TILE_THREADS / WARPS_M && TK % ROUND == 0, "whole warps");

// Whether pixels need no thread on their way.
template <class Input>
constexpr bool ASYNC = false;
template <>
constexpr bool ASYNC<const T*> = sizeof(T) == 4 && !LAST;

struct Slices {
    alignas(16) Acc w[2][BK][R][S][BM];
    Acc x[2][BK][LANES_N * IMAGE];
};
struct Sums {
    Acc at[WARPS][ROUND][32 * TQ];
};
union Shared {
    Slices slices;
    Sums sums;
};

// The first output of the block, its group and its first channel in it.
struct Tile {
    Offset n, p, q;
    int group, row;
};

// A spot of the footprint: an image's row and column, which may lie beyond its borders.
struct Pixel {
    Offset n, h, v;

    DEVICE Pixel(const Tile& tile, int spot) {
        const int line = spot / WIDTH, column = spot % WIDTH;
        n = tile.n + line / LINES;
        h = (tile.p + line % SPAN_H) * STEP_H + line / SPAN_H % COMPONENTS_H * DILATION_H - START_H;
        v = (tile.q + column % SPAN_W) * STEP_W + column / SPAN_W * DILATION_W - START_W;
    }
};

// Where it lies in the group's first channel, or a negative number.
DEVICE Offset source(const Tile& tile, int spot) {
    const Pixel at(tile, spot);
    const bool exists = at.n < N && within(at.h, IN_H) && within(at.v, IN_W);
    return exists ? in_at(at.n, static_cast<int>(tile.group * DEPTH), at.h, at.v) : -1;
}

// Where it lies in shared memory.
DEVICE int kept_at(int spot) {
    const int line = spot / WIDTH;
    return line / LINES * IMAGE + line % LINES * PITCH + spot % WIDTH;
}

// Where output j of a run lies in the group's first channel, or a negative number.
DEVICE Offset target(const Tile& tile, int run, int j) {
    const Offset n = tile.n + run / (LANES_P * LANES_Q), p = tile.p + run / LANES_Q % LANES_P;
    const Offset q = tile.q + run % LANES_Q * TQ + j;
    const bool exists = run < RUNS && n < N && p < OUT_H && q < OUT_W;
    return exists ? out_at(n, static_cast<int>(tile.group * ROWS), p, q) : -1;
}

// The same place in BK channels, of a slice: in registers, then in shared memory.
struct Spot {
    Acc value[BK];

    DEVICE void fetch(const Texture& x, const Tile& tile, int spot, int slice) {
        constexpr Offset CHANNELS = GROUPS * DEPTH;
        const Pixel at(tile, spot);
        const bool exists = within(at.h, IN_H);  // images beyond the last are beyond the texture
        const Offset channel = tile.group * DEPTH + Offset(slice) * BK;
        const Offset row = LAST ? at.n * IN_H + at.h : (at.n * CHANNELS + channel) * IN_H + at.h;
#pragma unroll
        for (int c = 0; c < BK; c++) {
            const Offset column = LAST ? at.v * CHANNELS + channel + c : at.v;
            const Offset line = exists ? row + (LAST ? 0 : c * IN_H) : -1;
            value[c] = Acc(to_float(Texel<T>::of(texel_bits(x, static_cast<int>(column), static_cast<int>(line)))));
        }
    }

    DEVICE void fetch(const T* x, const Tile& tile, int spot, int slice) {
        constexpr int RUN = LAST && DEPTH % 4 == 0 && BK % 4 == 0 ? 4 : 1;
        const Offset from = spot < SPOTS ? source(tile, spot) : -1;
#pragma unroll
        for (int c = 0; c < BK; c += RUN) {
            const Offset channel = Offset(slice) * BK + c;
            Acc run[RUN];
            load_run(run, x, {from, channel * CHANNEL_IN, from >= 0 && channel < DEPTH});
#pragma unroll
            for (int i = 0; i < RUN; i++) value[c + i] = run[i];
        }
    }

    DEVICE void store(Acc (&to)[BK][LANES_N * IMAGE], int spot) const {
        if (spot < SPOTS)
#pragma unroll
            for (int c = 0; c < BK; c++) to[c][kept_at(spot)] = value[c];
    }
};

DEVICE int spot_of(int i) {  // with many spots, places take more registers to keep than work to find again
    return (COUNT <= 4 ? static_cast<int>(threadIdx.x) : launder(threadIdx.x)) + i * TILE_THREADS;
}

// Starts on what comes next: asynchronous copies, loads to registers, and what these cannot hold, at once.
template <class Input>
DEVICE void start(Slices& to, int half, Spot (&held)[HELD], const Input& x, const Acc* filters, const Tile& tile,
                  int slice) {
    constexpr int RUN = 16 / sizeof(Acc);
    const Acc* from = filters + (long long)slice * FILTERS;
    for (int at = launder(threadIdx.x) * RUN; at < FILTERS; at += TILE_THREADS * RUN)
        copy_async16(&to.w[half][0][0][0][0] + at, from + at, true);
    if constexpr (ASYNC<Input>) {
#pragma unroll 4
        for (int i = 0; i < COUNT; i++) {
            const int spot = spot_of(i);
            if (spot >= SPOTS) continue;
            const Offset place = source(tile, spot);
            const T* first = place < 0 ? x : x + place + Offset(slice) * BK * CHANNEL_IN;
#pragma unroll
            for (int c = 0; c < BK; c++) {
                if (Offset(slice) * BK + c >= DEPTH) continue;
                copy_async4(&to.x[half][c][kept_at(spot)], first + c * CHANNEL_IN, place >= 0);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < HELD; i++) held[i].fetch(x, tile, spot_of(i), slice);
#pragma unroll 4
        for (int i = HELD; i < COUNT; i++) {
            Spot spot;
            spot.fetch(x, tile, spot_of(i), slice);
            spot.store(to.x[half], spot_of(i));
        }
    }
    commit_copies();
}

template <class Input>
DEVICE void finish(Slices& to, int half, const Spot (&held)[HELD]) {
    if constexpr (!ASYNC<Input>)
#pragma unroll
        for (int i = 0; i < HELD; i++) held[i].store(to.x[half], spot_of(i));
    wait_copies<0>();
    __syncthreads();
}

DEVICE void multiply_slice(Acc (&sum)[TQ][TK], const Slices& slices, int half, int channels, int run, int row) {
    const int mine = run % RUNS;  // threads without a run do another's again
    const int begin = mine / (LANES_P * LANES_Q) * IMAGE + mine / LANES_Q % LANES_P * PITCH + mine % LANES_Q * TQ;
#pragma unroll 1
    for (int c = 0; c < channels; c++)
#pragma unroll UNROLLED
        for (int r = 0; r < R; r++) {
            const int line = r % PERIOD_H * SPAN_H + r / PERIOD_H * SHIFT_H;
            const Acc* pixels = &slices.x[half][c][begin + line * PITCH];
#pragma unroll
            for (int component = 0; component < COMPONENTS_W; component++) {
                Acc window[WINDOW];
#pragma unroll
                for (int i = 0; i < WINDOW; i++) window[i] = pixels[component * SPAN_W + i];
#pragma unroll
                for (int s = component; s < S; s += PERIOD_W) {
                    Acc w[TK];
#pragma unroll
                    for (int k = 0; k < TK; k += 4) read4(&w[k], &slices.w[half][c][r][s][row + k]);
#pragma unroll
                    for (int j = 0; j < TQ; j++)
#pragma unroll
                        for (int k = 0; k < TK; k++) sum[j][k] += window[j + s / PERIOD_W * SHIFT_W] * w[k];
                }
            }
        }
}

// Neighbouring channels lie together in a thread already.
DEVICE void write_last(const Acc (&sum)[TQ][TK], const Tile& tile, int run, T* out, const T* bias,
                       const T* residual) {
    constexpr int RUN = ROWS % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int j = 0; j < TQ; j++) {
        const Offset place = target(tile, run, j);
        if (place < 0) continue;
#pragma unroll
        for (int k = 0; k < TK; k += RUN) {
            const int row = tile.row + k, channel = static_cast<int>(tile.group * ROWS) + row;
            if (row < ROWS) write_channels<RUN>(&sum[j][k], channel, place + row, out, bias, residual);
        }
    }
}

// Neighbouring pixels lie TQ to a thread: they meet in shared memory, some channels at a time.
DEVICE void write_pixels(const Acc (&sum)[TQ][TK], Sums& sums, const Tile& tile, int run, T* out, const T* bias,
                         const T* residual) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int k = 0; k < TK; k += ROUND) {
#pragma unroll
        for (int i = 0; i < ROUND; i++)
#pragma unroll
            for (int j = 0; j < TQ; j++) sums.at[warp][i][lane * TQ + j] = sum[j][k + i];
        __syncthreads();
        for (int pixel = lane; pixel < 32 * TQ; pixel += 32) {
            const Offset place = target(tile, run - lane + pixel / TQ, pixel % TQ);
            if (place < 0) continue;
#pragma unroll
            for (int i = 0; i < ROUND; i++) {
                const int row = tile.row + k + i, channel = static_cast<int>(tile.group * ROWS) + row;
                if (row >= ROWS) continue;
                const Offset at = place + row * CHANNEL_OUT;
                out[at] = finished(sums.at[warp][i][pixel], bias, residual, channel, at);
            }
        }
        __syncthreads();
    }
}

template <class Input>
DEVICE void convolve_tile(Shared& shared, const Input& x, const Acc* U, T* out, const T* bias, const T* residual) {
    const int warp = static_cast<int>(threadIdx.x) / 32, row = warp % WARPS_M * TK;
    const int run = warp / WARPS_M * 32 + static_cast<int>(threadIdx.x) % 32;
    const int group = blockIdx.z, block = static_cast<int>(blockIdx.x) % ROW_BLOCKS;  // neighbours share pixels
    const Offset number = static_cast<Offset>(blockIdx.x) / ROW_BLOCKS;
    const Tile tile = {number / TILES_Q / TILES_P * LANES_N, number / TILES_Q % TILES_P * LANES_P,
                       number % TILES_Q * (LANES_Q * TQ), group, block * BM + row};
    const Acc* filters = U + (long long)(group * ROW_BLOCKS + block) * SLICES * FILTERS;
    Acc sum[TQ][TK] = {};
    Spot held[HELD];
    start(shared.slices, 0, held, x, filters, tile, 0);
    finish<Input>(shared.slices, 0, held);
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++) {
        const int half = slice & 1;
        if (slice + 1 < SLICES) start(shared.slices, half ^ 1, held, x, filters, tile, slice + 1);
        const int channels = slice + 1 < SLICES ? BK : static_cast<int>(DEPTH) - (SLICES - 1) * BK;
        multiply_slice(sum, shared.slices, half, channels, run, row);
        finish<Input>(shared.slices, half ^ 1, held);
    }
    if constexpr (LAST)
        write_last(sum, tile, run, out, bias, residual);
    else
        write_pixels(sum, shared.sums, tile, run, out, bias, residual);
}
