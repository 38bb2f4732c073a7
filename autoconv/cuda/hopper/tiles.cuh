// What implicit GEMMs by Hopper's own means share, NHWC; and NCHW, where filters have one tap. The copy engine walks through the pixels of x (or of dy) as a
// filter tap does and brings zeros where there are none.
//   fwd    y[(n,p,q), k]   = sum over (r,s,c)  of  x[(n,p,q) at (r,s), c]   w[k, (r,s), c]
//   dgrad dx[(n,h,w), c]   = sum over (r,s,k)  of dy[(n,h,w) at (r,s), k]   w[k, (r,s), c]
//   wgrad dw[k, (r,s), c]  = sum over (n,p,q)  of dy[(n,p,q), k]             x[(n,p,q) at (r,s), c]
// One warpgroup fetches, the others multiply: STAGES slices of the depth are on their way or in use, and a stage
// goes back when the products that read it are done. A block takes one tile after the other, so the next tile's slices
// come in while a finished one is written. Its warpgroups share a tile; or, if they ALTERNATE, have whole tiles in
// turn, so that one multiplies while the other one writes (the "ping-pong" of CUTLASS 3).
//
// With a stride, dgrad is a pass for each remainder of (h, w): only some taps meet it, and they do so as an
// unstrided convolution of dy does. PIXEL_* and TAP_* below are of a pass.
#pragma once
#include "../common/split.cuh"
#include "hopper.cuh"

constexpr bool WEIGHTS = DIRECTION == WGRAD;
constexpr bool ROWS_ACROSS = WEIGHTS || POINTWISE;  // a line of shared memory has rows of the product, not depth
constexpr int LINE = LINE_BYTES / sizeof(T);  // values to a line
constexpr int BK = LINE;
constexpr int WARPGROUP = 128;
constexpr int WM = ALTERNATE ? BM : BM / CONSUMERS, FM = WM / 64;
static_assert(THREADS == (CONSUMERS + 1) * WARPGROUP && WM % 64 == 0 && BN % 64 == 0, "whole warpgroups");

constexpr int PIXELS = static_cast<int>(N) * PIXEL_ROWS * PIXEL_COLUMNS;
constexpr int TAPS = TAPS_H * TAPS_W;
constexpr int RUNS = PIXEL_COLUMNS / LINE;  // of an image of NCHW: pixels that come at once, of one image each
constexpr int CHANNELS = DIRECTION == DGRAD ? KG : CG;  // of one group, in the array of pixels
constexpr int ROWS = WEIGHTS ? KG : PIXELS;
constexpr int COLUMNS = DIRECTION == FWD ? KG : CG;     // of one group; of one tap, for wgrad
constexpr int WIDTH = 64;                               // columns of wgrad that come at once: channels of one tap
constexpr int PER_TAP = ceil_div(COLUMNS, WIDTH);       // such runs of them
constexpr int CHUNKS = ceil_div(CHANNELS, BK);
constexpr int SLICES = WEIGHTS ? ceil_div(PIXELS, BK) : TAPS * CHUNKS;
constexpr int EACH = ceil_div(SLICES, SPLIT);
constexpr int TILES_M = ceil_div(ROWS, BM), TILES_N = ceil_div(WEIGHTS ? TAPS * PER_TAP * WIDTH : COLUMNS, BN);
constexpr int TILES = TILES_M * TILES_N;
constexpr int WORK = TILES * GROUPS * SPLIT;
constexpr int TEAMS = ALTERNATE ? 1 : CONSUMERS;        // warpgroups to a tile: each sums its own part of it

template <class Stage>
struct Ring {
    Stage stage[STAGES];
    Barrier full[STAGES], empty[STAGES];
    Barrier multiplied[CONSUMERS];  // how many tiles a warpgroup has
};

// Which stage comes next, and how often its barriers have gone round.
struct Turn {
    int stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    DEVICE void skip(int slices) {
        stage += slices;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

struct Job {
    int group, part, row, column;
    DEVICE int first() const { return part * EACH; }  // no less than last() for a part without slices
    DEVICE int last() const { return (part + 1) * EACH < SLICES ? (part + 1) * EACH : SLICES; }
};
DEVICE Job job(int index) {
    const TileAt tile = tile_at<TILES_M, TILES_N>(index % TILES);
    return {index / TILES % GROUPS, index / TILES / GROUPS, tile.row * BM, tile.column * BN};
}

// Where WIDTH columns of wgrad begin: at a channel of a tap, which is none of the filter's behind the last.
struct Columns {
    int tap, channel;
};
DEVICE Columns columns_at(int column) { return {column / WIDTH / PER_TAP, column / WIDTH % PER_TAP * WIDTH}; }

// Whose depth the slices are of, where it is channels of a filter's taps; the first of its channels.
struct Depth {
    int tap, filter_tap, chunk;
};
DEVICE Depth depth_of(int slice) {
    const int tap = slice / CHUNKS;
    const int r = FIRST_R + tap / TAPS_W * NEXT_R, s = FIRST_S + tap % TAPS_W * NEXT_S;
    return {tap, r * static_cast<int>(S) + s, slice % CHUNKS};
}

DEVICE void fetch_from(void* to, const TensorMap& map, Barrier& barrier, int channel, int place, int tap) {
    const int image = place / (PIXEL_ROWS * PIXEL_COLUMNS), row = place / PIXEL_COLUMNS % PIXEL_ROWS;
    fetch_pixels(to, map, barrier, channel, place % PIXEL_COLUMNS * PIXEL_STRIDE_W + PIXEL_LOW_W,
                 row * PIXEL_STRIDE_H + PIXEL_LOW_H, image, tap % TAPS_W * TAP_STRIDE_W, tap / TAPS_W * TAP_STRIDE_H);
}

// The same for columns of wgrad; of no tap, those of the last.
DEVICE void fetch_tap(void* to, const TensorMap& map, Barrier& barrier, Job at, int column, int place) {
    const Columns first = columns_at(at.column + column);
    fetch_from(to, map, barrier, at.group * CG + first.channel, place, first.tap < TAPS ? first.tap : TAPS - 1);
}

// A slice of the tile's rows.
DEVICE void fetch_rows(T* to, Barrier& barrier, const TensorMap& pixels, const TensorMap& other, Job at, int slice) {
    if constexpr (WEIGHTS) {
#pragma unroll
        for (int i = 0; i < BM; i += LINE)
            fetch_box(to + i * BK, other, barrier, at.group * KG + at.row + i, slice * BK, 0);
    } else if constexpr (POINTWISE) {
#pragma unroll
        for (int i = 0; i < BM; i += LINE) {
            const int run = (at.row + i) / LINE;
            fetch_box(to + i * BK, pixels, barrier, run % RUNS * LINE, slice * BK, run / RUNS);
        }
    } else {
        const Depth depth = depth_of(slice);
        fetch_from(to, pixels, barrier, at.group * CHANNELS + depth.chunk * BK, at.row, depth.tap);
    }
}

template <class Stage>
DEVICE void produce(Ring<Stage>& ring, const TensorMap& pixels, const TensorMap& other) {
    Turn turn;
    for (int index = static_cast<int>(blockIdx.x); index < WORK; index += static_cast<int>(gridDim.x)) {
        const Job at = job(index);
        for (int slice = at.first(); slice < at.last(); slice++) {
            Barrier& full = ring.full[turn.stage];
            await(ring.empty[turn.stage], turn.parity ^ 1);  // at first, "the phase before" has ended
            Stage& to = ring.stage[turn.stage];
            arrive_expecting(full, sizeof(Stage));
            fetch_rows(to.a, full, pixels, other, at, slice);
            fetch_columns(to, full, pixels, other, at, slice);
            turn.next();
        }
    }
}

// Four lanes hold columns 2 lane, 2 lane + 1 of four blocks of eight; each gets one block whole.
DEVICE void gather(float (&v)[8], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool high = lane & bit;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            if (block & bit) continue;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &low = v[2 * block + e], &up = v[2 * (block | bit) + e];
                const float other = shuffle_xor(high ? low : up, bit);
                low = high ? other : low;
                up = high ? up : other;
            }
        }
    }
}

// Neighbours that travel at once.
template <class Element>
struct alignas(16) Run {
    Element value[16 / sizeof(Element)];
};

struct Output {
    T* out;
    const T *bias, *residual;
};
// With SPLIT > 1, where parts of the depth wait, and the tickets.
struct Scratch {
    Acc* parts;
    unsigned* tickets;
};

// Eight neighbouring sums, from this column of the group's on; `room` of them exist, or none where it is negative.
DEVICE void write(const float (&v)[8], const Output& to, Offset at, int k, int room) {
    constexpr int LAST = DIRECTION == FWD ? KG : CG;
    if constexpr (LAST % (16 / sizeof(T)) == 0) {
        constexpr int WIDE = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < 8; i += WIDE) {
            if (i >= room) break;
            Run<T> b = {}, s = {}, r = {}, y;
            if constexpr (BIAS) b = aligned<Run<T>>(to.bias + k + i);
            if constexpr (PRELU) s = aligned<Run<T>>(to.bias + SLOPES + k + i);
            if constexpr (RESIDUAL) r = aligned<Run<T>>(to.residual + at + i);
#pragma unroll
            for (int e = 0; e < WIDE; e++) y.value[e] = finished(v[i + e], b.value, s.value, r.value, e, e);
            aligned<Run<T>>(to.out + at + i) = y;
        }
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < room) to.out[at + e] = finished(v[e], to.bias, to.residual, k + e, at + e);
    }
}

// Where a row of the product begins in the output.
DEVICE Offset row_at(Job at, int row) {
    if constexpr (WEIGHTS) return Offset(at.group * KG + row) * (TAPS * CG);
    if constexpr (DIRECTION == FWD) return Offset(row) * K + at.group * KG;
    const int image = row / (PIXEL_ROWS * PIXEL_COLUMNS);
    const Offset h = row / PIXEL_COLUMNS % PIXEL_ROWS * STRIDE_H + OFFSET_H;
    const Offset v = row % PIXEL_COLUMNS * STRIDE_W + OFFSET_W;
    return x_at(image, at.group * CG, h, v);
}

// Four lanes, four apart, hold one pixel each of four columns; each gets the four pixels of a column.
DEVICE void turn(float (&v)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool high = lane / 4 & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            const float other = shuffle_xor(high ? v[i] : v[i | bit], 4 * bit);
            v[i] = high ? other : v[i];
            v[i | bit] = high ? v[i | bit] : other;
        }
    }
}

// The same part of a tile whose rows are pixels of NCHW: four neighbours of an image travel at once.
DEVICE void write_pixels(float (&sum)[FM][BN / 2], Job at, int row, const Output& to) {
    struct alignas(4 * sizeof(T)) Four {
        T value[4];
    };
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    constexpr Offset PLACES = DIRECTION == FWD ? P * Q : H * W;
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int pixel = at.row + row + i * 64 + warp * 16 + half * 8 + lane / 16 * 4;
            const int image = pixel / PIXEL_COLUMNS, place = pixel % PIXEL_COLUMNS;
#pragma unroll
            for (int j = 0; j < BN / 16; j++) {
                float v[4];
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] = sum[i][(2 * j + e / 2) * 4 + half * 2 + e % 2];
                turn(v, lane);
                const int mine = lane / 4 % 4, k = at.column + (2 * j + mine / 2) * 8 + lane % 4 * 2 + mine % 2;
                if (image >= N || place >= PLACES || k >= COLUMNS) continue;
                const Offset start = DIRECTION == FWD ? y_at(image, k, 0, place) : x_at(image, k, 0, place);
                Four four;
#pragma unroll
                for (int e = 0; e < 4; e++) four.value[e] = finished(v[e], to.bias, to.residual, k, start + e);
                aligned<Four>(to.out + start) = four;
            }
        }
}

// The warpgroup's part of the tile, from this row on; of each eight rows, four lanes together have the `of_eight`-th.
DEVICE void write_tile(float (&sum)[FM][BN / 2], Job at, int row, int of_eight, const Output& to) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int y = at.row + row + i * 64 + warp * 16 + half * 8 + of_eight;
            const Offset start = row_at(at, y);
#pragma unroll
            for (int j = 0; j < BN / 32; j++) {
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] = sum[i][j * 16 + e / 2 * 4 + half * 2 + e % 2];
                gather(v, lane);
                int x = at.column + j * 32 + lane % 4 * 8;
                Offset tap = 0;
                if constexpr (WEIGHTS) {
                    const Columns first = columns_at(at.column + j * 32);
                    if (first.tap >= TAPS) break;
                    x = first.channel + x % WIDTH;
                    tap = Offset(first.tap) * CG;
                }
                if (y < ROWS) write(v, to, start + tap + x, at.group * KG + x, COLUMNS - x);
            }
        }
}

// The tiles of a warpgroup that multiplies. Where they alternate, each begins when the one before is done with its
// slices: earlier it would take their stages for its own.
template <class Stage>
DEVICE void consume(Ring<Stage>& ring, int warpgroup, const Output& to, const Scratch& scratch) {
    constexpr int TOGETHER = ALTERNATE ? CONSUMERS : 1, SUMS = FM * BN / 2;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = ALTERNATE ? 0 : warpgroup * WM;
    Turn turn;
    int tile = 0;
    for (int index = static_cast<int>(blockIdx.x); index < WORK; index += static_cast<int>(gridDim.x), tile++) {
        const Job at = job(index);
        if (ALTERNATE && tile % TOGETHER != warpgroup) {
            turn.skip(at.last() - at.first());  // negative for parts without slices, behind which are only such
            continue;
        }
        float sum[FM][BN / 2] = {};
        if (ALTERNATE && tile > 0)
            await(ring.multiplied[(tile - 1) % TOGETHER], (tile - 1) / TOGETHER & 1);
        multiply_slices(sum, ring, turn, at, row);
        if (ALTERNATE && lane == 0) arrive(ring.multiplied[warpgroup]);
        const int mine = index % (TILES * static_cast<int>(GROUPS)) * TEAMS + (ALTERNATE ? 0 : warpgroup);
        const Team<SUMS, WARPGROUP> team = {static_cast<int>(threadIdx.x) % WARPGROUP, 1 + warpgroup,
                                            scratch.parts + static_cast<long long>(mine) * (SPLIT * WM * BN),
                                            scratch.tickets + static_cast<long long>(mine) * TICKETS};
        if (!team.complete(flat<SUMS>(sum), at.part)) continue;
        if constexpr (POINTWISE)
            write_pixels(sum, at, row, to);
        else
            write_tile(sum, at, row, Stage::row_of_eight(lane), to);
    }
}

// A block: the warpgroups that multiply, and the one that fetches.
template <class Stage>
DEVICE void run_block(Ring<Stage>& ring, const TensorMap& pixels, const TensorMap& other, const Output& to,
                      const Scratch& scratch) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            init_barrier(ring.full[i], 1);
            init_barrier(ring.empty[i], (ALTERNATE ? 1 : CONSUMERS) * WARPGROUP / 32);  // a lane of each warp
        }
        if constexpr (ALTERNATE)
#pragma unroll
            for (int i = 0; i < CONSUMERS; i++) init_barrier(ring.multiplied[i], WARPGROUP / 32);
        fence_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS * WARPGROUP) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARPGROUP) {
            prefetch_map(pixels);
            prefetch_map(other);
            produce(ring, pixels, other);
        }
    } else {
        more_registers<CONSUMER_REGISTERS>();
        consume(ring, static_cast<int>(threadIdx.x) / WARPGROUP, to, scratch);
    }
}
