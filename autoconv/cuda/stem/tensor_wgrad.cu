// The gradient of the filters of layers with few input channels, NCHW, on tensor cores:
//   dw[k, (c,r,s)] = sum over (n,p,q)  of  dy[(n,p,q), k]  x[(n,p,q), (c,r,s)]
// There are so few columns (c,r,s) that dy is most of what is read. It goes from global memory straight to the
// registers of who multiplies it. A tile of TP x TQ output pixels meets a patch of x, which lies in shared memory with
// zeros for the border, and as pairs of what two neighbouring outputs see through the same tap: one word is half a
// fragment, wherever the tap puts it.
//
// A float32 is the sum of three bfloat16 numbers, and a product of two the sum of six. Tensor cores cut off what they
// add, always towards zero, so a long sum in them would drift: they sum 16 pixels alone, the small products first, and
// rounding additions do the rest.
//
// Of a block's warps WARPS_M have other filters, WARPS_N other columns and WARPS_P other pixels of the tile, neighbours
// at the same time.

#include "../common/implicit.cuh"
#include "../common/split.cuh"

constexpr int COLUMNS = static_cast<int>(C * R * S);
constexpr int WARP_FILTERS = BM / WARPS_M, WARP_COLUMNS = BN / WARPS_N;
constexpr int FM = WARP_FILTERS / 16, FN = WARP_COLUMNS / 8;  // fragments of a warp
constexpr int TILES_N = ceil_div(COLUMNS, BN);
constexpr Offset TILES_P = (P + TP - 1) / TP, TILES_Q = (Q + TQ - 1) / TQ, TILES = N * TILES_P * TILES_Q;
constexpr Offset EACH = (TILES + SPLIT - 1) / SPLIT;
constexpr int DEEP = 16;                                      // pixels of a slice, in a row
constexpr int ACROSS = TQ / DEEP;                             // slices to a row of a tile
constexpr int SLICES = TP * ACROSS / WARPS_P;                 // of a tile, to a warp
static_assert(THREADS == WARPS_M * WARPS_N * WARPS_P * 32 && WARP_FILTERS % 16 == 0 && WARP_COLUMNS % 8 == 0 &&
              TP * ACROSS % WARPS_P == 0 && TQ % DEEP == 0, "whole fragments");

// Neighbours of dy that travel at once. The depth may have any order that both operands share: of four together a lane
// takes them as they come; else its two pairs are eight pixels apart, where lanes of wide strides meet other banks.
constexpr int RUN = Q % 4 == 0 && STRIDE_W % 4 != 0 ? 4 : Q % 2 == 0 ? 2 : 1;
constexpr int LANE_STEP = RUN == 4 ? 4 : 2, SECOND_PAIR = RUN == 4 ? 2 : 8;
constexpr bool RAGGED = Q % DEEP != 0;  // slices may have pixels beyond the image

constexpr int PARTS = 3;
constexpr int PATCH_ROWS = static_cast<int>((TP - 1) * STRIDE_H + (R - 1) * DILATION_H + 1);
constexpr int PATCH_WIDTH = static_cast<int>((TQ - 2) * STRIDE_W + (S - 1) * DILATION_W + 1);
constexpr int WORDS = static_cast<int>(C) * PATCH_ROWS * PATCH_WIDTH;
// Words of a thread for each slice that it multiplies; of them AT_ONCE are on their way meanwhile.
constexpr int WORDS_EACH = ceil_div(WORDS, THREADS * SLICES), AT_ONCE = WORDS_EACH < AHEAD ? WORDS_EACH : AHEAD;
constexpr int ROUNDS = ceil_div(WORDS_EACH, AT_ONCE);

// From a row, and from a channel, to the next: such that the lanes that read a fragment meet few of each other's banks.
struct Patch {
    unsigned part[PARTS][static_cast<int>(C) * PLANE];
};
// Of a fragment's rows, when all is multiplied.
struct Sums {
    float at[WARPS_P][WARPS_M * 16][BN + 8];
};
union Shared {
    Patch patch[2];
    Sums sums;
};

// Its first output pixel.
struct Tile {
    Offset n, p, q;
    DEVICE explicit Tile(Offset index) {
        Digits digits(index);
        q = digits.next(TILES_Q) * TQ;
        p = digits.next(TILES_P) * TP;
        n = digits.last();
    }
    DEVICE Tile(bool first, const Tile& a, const Tile& b)
        : n(first ? a.n : b.n), p(first ? a.p : b.p), q(first ? a.q : b.q) {}
};

// Two numbers in parts, the largest first: each what is nearest to what the ones before leave.
DEVICE void split(unsigned& first, unsigned& second, unsigned& third, float low, float high) {
    first = to_bfloat16_pair(low, high);
    low -= bits_float(first << 16);
    high -= bits_float(first & 0xffff0000u);
    second = to_bfloat16_pair(low, high);
    third = to_bfloat16_pair(low - bits_float(second << 16), high - bits_float(second & 0xffff0000u));
}

// Where a word of a patch belongs; words beyond the last are of no channel.
struct Spot {
    int c, row, along;
    DEVICE explicit Spot(unsigned word) {
        along = static_cast<int>(word % PATCH_WIDTH);
        row = static_cast<int>(word / PATCH_WIDTH % PATCH_ROWS);
        c = static_cast<int>(word / (PATCH_WIDTH * PATCH_ROWS));
    }
};

// A thread's words of a patch, some at a time.
struct Fill {
    float low[AT_ONCE], high[AT_ONCE];

    DEVICE static unsigned word(int round, int i) { return (round * AT_ONCE + i) * THREADS + threadIdx.x; }
    DEVICE void fetch(const T* x, const Tile& tile, int round) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const Spot spot(word(round, i));
            const Offset h = tile.p * STRIDE_H - PAD_TOP + spot.row, v = tile.q * STRIDE_W - PAD_LEFT + spot.along;
            const bool exists = spot.c < C && within(h, H);
            const T* from = x + x_at(tile.n, spot.c, h, v);
            low[i] = exists && within(v, W) ? from[0] : 0.0f;
            high[i] = exists && within(v + STRIDE_W, W) ? from[STRIDE_W] : 0.0f;
        }
    }
    DEVICE void store(Patch& patch, int round) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const Spot spot(word(round, i));
            unsigned part[PARTS];
            split(part[0], part[1], part[2], low[i], high[i]);
            if (spot.c >= C) continue;
#pragma unroll
            for (int p = 0; p < PARTS; p++) patch.part[p][spot.c * PLANE + spot.row * PITCH + spot.along] = part[p];
        }
    }
};

// Words that nobody multiplies meanwhile.
DEVICE void fill_rounds(const T* x, const Tile& tile, Patch& patch, int first, int count) {
#pragma unroll 1
    for (int round = first; round < first + count; round++) {
        Fill fill;
        fill.fetch(x, tile, round);
        fill.store(patch, round);
    }
}

// What a lane multiplies of a slice of dy: of two filters of each fragment, two pairs of pixels.
struct Rows {
    float value[FM][2][4];

    // From where the first filter has the lane's first pixel, which lies at `q` of a row that exists.
    DEVICE void fetch(const T* from, int k, Offset q) {
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 4; e += RUN) {
                    const int pixel = e / 2 * SECOND_PAIR + e % 2, further = i * 16 + half * 8;
                    const bool exists = (K % BM == 0 || k + further < K) && (!RAGGED || q + pixel < Q);
                    Run<T, RUN> run = {};
                    if (exists) run = aligned<Run<T, RUN>>(from + further * (P * Q) + pixel);
#pragma unroll
                    for (int a = 0; a < RUN; a++) value[i][half][e + a] = run.value[a];
                }
    }
    // The fragments of each part.
    DEVICE void split_to(unsigned (&a)[PARTS][FM][4]) const {
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float(&of)[4] = value[i][r % 2];
                split(a[0][i][r], a[1][i][r], a[2][i][r], of[r / 2 * 2], of[r / 2 * 2 + 1]);
            }
    }
};

// Which of a lane's pixels a row of the output has, a pair to each register: what the others meet of x is left out, as
// it need not be a number.
struct Pixels {
    unsigned mask[2];
    DEVICE explicit Pixels(Offset q) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Offset first = q + half * SECOND_PAIR;
            mask[half] = (first < Q ? 0x0000ffffu : 0u) | (first + 1 < Q ? 0xffff0000u : 0u);
        }
    }
};

// `from` is where the lane's first pixel is met by the first tap, in the largest part.
DEVICE void multiply_slice(float (&sum)[FM][FN][4], const unsigned (&a)[PARTS][FM][4], const unsigned* from,
                           const int (&taps)[FN], const Pixels& pixels) {
#pragma unroll
    for (int j = 0; j < FN; j++) {
        unsigned b[PARTS][2];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                b[p][half] = (from + taps[j])[p * (static_cast<int>(C) * PLANE) + half * (SECOND_PAIR * STRIDE_W)];
                if constexpr (RAGGED) b[p][half] &= pixels.mask[half];
            }
        float part[FM][4] = {};
#pragma unroll
        for (int smaller = PARTS - 1; smaller >= 0; smaller--)  // the products that are about as small as that part
#pragma unroll
            for (int p = 0; p <= smaller; p++)
#pragma unroll
                for (int i = 0; i < FM; i++) multiply(bfloat16_t{}, part[i], a[p][i], b[smaller - p]);
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] += part[i][e];
    }
}

// Where a thread is in its block, and its block among the filters and columns.
struct Where {
    int lane, warp_p, warp_n, warp_m, filter0, column0;
    DEVICE Where(int thread, int block)
        : lane(thread % 32),
          warp_p(thread / 32 % WARPS_P),
          warp_n(thread / (32 * WARPS_P) % WARPS_N),
          warp_m(thread / (32 * WARPS_P * WARPS_N)),
          filter0(block / TILES_N * BM),
          column0(block % TILES_N * BN) {}
};

// The sums of the warps that had other pixels, added in their order; a thread has COUNT / FM of the rows of each of a
// warp's fragments.
constexpr int EACH_ROUND = WARPS_M * 16 * BN / THREADS, COUNT = FM * EACH_ROUND;
static_assert(WARPS_M * 16 * BN % THREADS == 0, "every thread has as many");
DEVICE void add_warps(Acc (&total)[COUNT], const float (&sum)[FM][FN][4], Sums& sums, const Where& my, int thread) {
#pragma unroll
    for (int i = 0; i < FM; i++) {
#pragma unroll
        for (int j = 0; j < FN; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums.at[my.warp_p][my.warp_m * 16 + e / 2 * 8 + my.lane / 4]
                       [my.warp_n * WARP_COLUMNS + j * 8 + my.lane % 4 * 2 + e % 2] = sum[i][j][e];
        __syncthreads();
#pragma unroll
        for (int u = 0; u < EACH_ROUND; u++) {
            const int place = u * THREADS + thread;
            Acc& all = total[i * EACH_ROUND + u] = 0;
#pragma unroll
            for (int w = 0; w < WARPS_P; w++) all += sums.at[w][place / BN][place % BN];
        }
        __syncthreads();
    }
}

// A block has BM filters and BN columns, over one SPLIT-th of the tiles of pixels.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tensor_wgrad(const T* x, const T* dy, T* dw, const T* bias, const T* residual, Acc* parts, unsigned* tickets) {
    SHARED_DYNAMIC(Shared, shared);
    const Where at(static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x));
    const int k = at.filter0 + at.warp_m * WARP_FILTERS + at.lane / 4, pixel = at.lane % 4 * LANE_STEP;
    const Offset first = static_cast<int>(blockIdx.z) * EACH, last = first + EACH < TILES ? first + EACH : TILES;
    int taps[FN];  // where each column's tap meets the first pixel; those beyond the last column are another's again
#pragma unroll
    for (int j = 0; j < FN; j++) {
        const int column = (at.column0 + at.warp_n * WARP_COLUMNS + j * 8 + at.lane / 4) % COLUMNS;
        taps[j] = static_cast<int>(column / (R * S) * PLANE + column / S % R * (DILATION_H * PITCH) +
                                   column % S * DILATION_W + pixel * STRIDE_W);
    }
    // Of a tile's slices this warp's: the row and the column of pixels, counted from the tile's first.
    const auto row_of = [&](int slice) { return (slice * WARPS_P + at.warp_p) / ACROSS; };
    const auto column_of = [&](int slice) { return (slice * WARPS_P + at.warp_p) % ACROSS * DEEP; };
    Rows rows = {};
    const auto exists = [&](const Tile& tile, int slice) {
        return (P % TP == 0 || tile.p + row_of(slice) < P) && (Q % TQ == 0 || tile.q + column_of(slice) < Q);
    };
    const auto fetch_rows = [&](const Tile& tile, int slice) {
        const Offset q = tile.q + column_of(slice) + pixel;
        if (exists(tile, slice)) rows.fetch(dy + y_at(tile.n, k, tile.p + row_of(slice), q), k, q);
    };
    Tile tile(first);
    if (first < last) {
        fetch_rows(tile, 0);
        fill_rounds(x, tile, shared.patch[0], 0, SLICES * ROUNDS);
    }
    __syncthreads();
    float sum[FM][FN][4] = {};
    int current = 0;
    for (Offset index = first; index < last; index++) {
        const bool more = index + 1 < last;
        const Tile next(index + 1);
#pragma unroll 1
        for (int slice = 0; slice < SLICES; slice++) {
            unsigned a[PARTS][FM][4];
            rows.split_to(a);
            // The next slice of dy and the next patch are on their way while this slice is multiplied.
            Fill fill;
            if (more) fill.fetch(x, next, slice * ROUNDS);
            const bool here = slice + 1 < SLICES;
            if (here || more) fetch_rows(Tile(here, tile, next), here ? slice + 1 : 0);
            const int corner = static_cast<int>(row_of(slice) * (STRIDE_H * PITCH) + column_of(slice) * STRIDE_W);
            if (exists(tile, slice))
                multiply_slice(sum, a, shared.patch[current].part[0] + corner, taps,
                               Pixels(tile.q + column_of(slice) + pixel));
            if (more) {
                fill.store(shared.patch[1 - current], slice * ROUNDS);
                if constexpr (ROUNDS > 1)
                    fill_rounds(x, next, shared.patch[1 - current], slice * ROUNDS + 1, ROUNDS - 1);
            }
        }
        __syncthreads();  // the next patch is there for all, and this one is free
        tile = next;
        current = 1 - current;
    }
    // What is wanted from here on is found again, and took no registers meanwhile.
    const int thread = thread_again(), block = block_x_again();
    const Where my(thread, block);
    Acc total[COUNT];
    add_warps(total, sum, shared.sums, my, thread);
    const Team<COUNT, THREADS> team = {thread, 0, parts + static_cast<long long>(block) * (SPLIT * COUNT * THREADS),
                                       tickets + block * TICKETS};
    if (!team.complete(total, block_z_again())) return;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int place = i % EACH_ROUND * THREADS + thread, row = place / BN, column = my.column0 + place % BN;
        const int filter = my.filter0 + row / 16 * WARP_FILTERS + i / EACH_ROUND * 16 + row % 16;
        if (filter < K && column < COLUMNS) dw[w_at(filter, 0, 0, 0) + column] = Rounded<T>::from(total[i]);
    }
}
