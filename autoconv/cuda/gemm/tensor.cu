// Implicit GEMM on the tensor cores, NHWC. Rows times columns, summed over the depth:
//   fwd    y[(n,p,q), k]   = sum over (r,s,c)  of  x[(n,p,q), (r,s,c)]  w[k, (r,s,c)]
//   dgrad dx[(n,h,w), c]   = sum over (r,s,k)  of dy[(n,h,w), (r,s,k)]  w[(r,s,k), c]
//   wgrad dw[k, (r,s,c)]   = sum over (n,p,q)  of dy[(n,p,q), k]        x[(n,p,q), (r,s,c)]
// Sixteen bytes of neighbouring channels travel at once to shared memory, STAGES - 1 slices ahead. Where the
// channels are the depth a slice lies there by rows, where they are not, by depth, and is transposed on its
// way to the registers. Padding is zeros that were never in memory.
//
// With PRODUCTS = 3, a float32 is the sum of two tf32 numbers, and a product of two the sum of three (3xTF32): that of
// both low parts is too small to matter. With PRODUCTS = 6 it is the sum of three bfloat16 numbers, and a product the sum
// of six. Tensor cores cut off what they add, always towards zero, so a long sum in them would drift: they sum one slice
// alone, the small products first, and the slices are added by rounding additions.

#include "../common/operands.cuh"
#include "../common/split.cuh"

constexpr bool PIXEL_ROWS = DIRECTION != WGRAD;  // rows are the pixels' lines, or else the flat operand's
constexpr Offset ROWS = PIXEL_ROWS ? PIXEL_LINES : FLAT_LINES, COLUMNS = PIXEL_ROWS ? FLAT_LINES : PIXEL_LINES;
constexpr int SLICES = static_cast<int>((DEPTH + BK - 1) / BK);
constexpr int TILES_M = static_cast<int>((ROWS + BM - 1) / BM), TILES_N = static_cast<int>((COLUMNS + BN - 1) / BN);
constexpr bool A_BY_ROWS = DIRECTION != WGRAD, B_BY_ROWS = DIRECTION == FWD;

constexpr int COPY = 16 / sizeof(T);                    // values that travel at once
constexpr int STEP = 2 * COPY;                          // depth of a load of fragments, of 32 bytes
constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;     // tile of a warp
constexpr int FM = WM / 16, FN = WN / 8;                // fragments of it
static_assert(THREADS == WARPS_M * WARPS_N * 32 && WM % 16 == 0 && WN % 32 == 0 && BK % STEP == 0, "whole fragments");

// EXTENT x BK values. So that copies of eight threads, and the rows of a fragment, lie in different banks, the four
// chunks of a line are exchanged among themselves where lines are short, and lines are padded where they are long.
template <int EXTENT, bool BY_ROWS>
struct Slice {
    static constexpr int LINES = BY_ROWS ? EXTENT : BK, LENGTH = BY_ROWS ? BK : EXTENT;
    static constexpr int PAD = BY_ROWS ? 0 : 8;
    static_assert(!BY_ROWS || LENGTH == 4 * COPY, "two lines to the 128 bytes of all banks");
    static constexpr int EIGHT_ROWS = 8 * (BY_ROWS ? LENGTH : 1);  // from a value to the one eight rows on
    static constexpr int PITCH = LENGTH + PAD;
    alignas(16) T at[LINES][PITCH];

    DEVICE T& place(int line, int along) { return at[line][BY_ROWS ? along ^ line / 2 % 4 * COPY : along]; }
    DEVICE T& value(int row, int depth) { return BY_ROWS ? place(row, depth) : place(depth, row); }
};

// Whether a thread finds its places in every slice, and keeps no registers for them, where the parts of numbers take so
// many. Older GPUs' compiler has enough of both only if it is left alone.
#if __CUDA_ARCH__ >= 1000
constexpr bool PLACES_ANEW = PRODUCTS > 1;
#else
constexpr bool PLACES_ANEW = false;
#endif

// What a thread copies of an operand: always the same place in a line, COUNT lines apart by LINE_STEP.
template <int EXTENT, bool BY_ROWS, class Operand>
struct Feed {
    using Target = Slice<EXTENT, BY_ROWS>;
    static constexpr int COPIES = Target::LENGTH / COPY, LINE_STEP = THREADS / COPIES;
    static constexpr int COUNT = Target::LINES / LINE_STEP, LINES = BY_ROWS ? COUNT : 1;
    static_assert(THREADS % COPIES == 0 && Target::LINES % LINE_STEP == 0, "every thread copies as much");
    Operand operand;
    const T* from;
    decltype(Operand{}.across(0)) across[LINES];

    DEVICE static int first(unsigned thread) { return static_cast<int>(thread % COPIES * COPY); }
    DEVICE static int line(unsigned thread, int i) { return static_cast<int>(thread / COPIES) + i * LINE_STEP; }

    DEVICE Feed(Operand of, const T* array, Offset start) : operand(of), from(array) {
#pragma unroll
        for (int i = 0; i < LINES; i++)
            across[i] = operand.across(start + (BY_ROWS ? line(threadIdx.x, i) : first(threadIdx.x)));
    }

    DEVICE void fetch(Target& slice, Offset depth) const {
        const unsigned thread = PLACES_ANEW ? launder(threadIdx.x) : threadIdx.x;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const auto along = operand.along(depth, BY_ROWS ? first(thread) : line(thread, i));
            const Position start = operand.meet(across[BY_ROWS ? i : 0], along);
            const auto at = static_cast<Offset>(start.begin + start.at);
            copy_async16(&slice.place(line(thread, i), first(thread)), from + (start.exists ? at : 0), start.exists);
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

// 32-bit values cannot be transposed on the way to registers: each lane reads its own.
template <bool BY_ROWS>
constexpr bool ONE_BY_ONE = sizeof(T) == 4 && !BY_ROWS;

// What a warp's fragments begin with: a row (or a column), or where in a slice the lane's first value lies.
template <class Slice, bool BY_ROWS>
DEVICE int fragments_from(int row, int lane) {
    return ONE_BY_ONE<BY_ROWS> ? launder(lane % 4 * Slice::PITCH + row + lane / 4) : row;
}

// Fragments of 16 rows (or two times 8 columns), `eights` times 8 from there, and STEP of depth.
template <bool A, int EXTENT, bool BY_ROWS>
DEVICE void load_fragments(unsigned (&d)[4], Slice<EXTENT, BY_ROWS>& slice, int from, int eights, int depth) {
    constexpr int EIGHT_ROWS = Slice<EXTENT, BY_ROWS>::EIGHT_ROWS, PITCH = Slice<EXTENT, BY_ROWS>::PITCH;
    if constexpr (!ONE_BY_ONE<BY_ROWS>) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        // the four matrices of 8 rows of 16 bytes go rows first for a, depth first for b
        const int second = lane / 8 % 2, fourth = lane / 16;
        T* line = &slice.value(from + (A ? second : fourth) * 8 + (BY_ROWS ? lane % 8 : 0),
                               depth + (A ? fourth : second) * COPY + (BY_ROWS ? 0 : lane % 8));
        if constexpr (BY_ROWS)
            load_matrices(d, line + eights * EIGHT_ROWS);
        else
            load_matrices_transposed(d, line + eights * EIGHT_ROWS);
    } else {
        const T* value = &slice.at[depth][0] + from;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int second = i % 2, fourth = i / 2;
            const int further = (A ? fourth : second) * 4 * PITCH + (eights + (A ? second : fourth)) * EIGHT_ROWS;
            d[i] = float_bits(to_float(value[further]));
        }
    }
    if constexpr (sizeof(T) == 4 && PRODUCTS == 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) d[i] = round_tf32(d[i]);
    }
}

constexpr int PARTS = PRODUCTS == 6 ? 3 : 2;
using PartType = Either<PRODUCTS == 6, bfloat16_t, T>;
constexpr int PART_STEP = PRODUCTS == 6 ? 2 * STEP : STEP;  // depth of one matrix instruction on parts

// Fragments in parts, the largest first: each what is nearest to what the ones before leave. One of the largest numbers
// may round to infinity, and a NaN become anything: then what is left is no number.
struct Parts {
    unsigned part[PARTS][4];

    // Two tf32 numbers; the tensor cores read as many bits as count.
    DEVICE void split(int at, unsigned value) {
        part[0][at] = (value + 0x1000u) & 0xffffe000u;
        part[1][at] = float_bits(bits_float(value) - bits_float(part[0][at])) & 0xffffe000u;
    }
    // Three pairs of bfloat16.
    DEVICE void split(int at, float low, float high) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const unsigned pair = part[p][at] = to_bfloat16_pair(low, high);
            low -= bits_float(pair << 16);
            high -= bits_float(pair & 0xffff0000u);
        }
    }
};

// Both operands' depths are in the same order, and any order will do: of the numbers that a lane has by loads of 32-bit
// fragments, those four apart are a pair, and those of the second load are the second half.
template <bool A, int EXTENT, bool BY_ROWS>
DEVICE void load_parts(Parts& d, Slice<EXTENT, BY_ROWS>& slice, int row, int eights, int depth) {
#pragma unroll
    for (int half = 0; half < PART_STEP / STEP; half++) {
        unsigned value[4];
        load_fragments<A>(value, slice, row, eights, depth + half * STEP);
        if constexpr (PRODUCTS == 6) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                d.split(A ? 2 * half + i : 2 * i + half, bits_float(value[A ? i : 2 * i]),
                        bits_float(value[A ? i + 2 : 2 * i + 1]));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) d.split(i, value[i]);
        }
    }
}

// part[j] += a b[j], of one part each
DEVICE void multiply_parts(float (&part)[FN][4], const unsigned (&a)[4], const Parts (&b)[FN / 2], int of_b) {
#pragma unroll
    for (int j = 0; j < FN; j++) {
        const unsigned* of = b[j / 2].part[of_b];
        const unsigned pair[2] = {of[j % 2 * 2], of[j % 2 * 2 + 1]};
        multiply(PartType{}, part[j], a, pair);
    }
}

DEVICE void multiply_stage_in_parts(float (&sum)[FM][FN][4], Stage& stage, int row, int column) {
    constexpr int STEPS = BK / PART_STEP;
    Parts b[STEPS][FN / 2];
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int j = 0; j < FN / 2; j++) load_parts<false>(b[step][j], stage.b, column, 2 * j, step * PART_STEP);
#pragma unroll
    for (int i = 0; i < FM; i++) {
        Parts a[STEPS];
        float part[FN][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) load_parts<true>(a[step], stage.a, row, 2 * i, step * PART_STEP);
#pragma unroll
        for (int smaller = PARTS - 1; smaller >= 0; smaller--)  // the products that are about as small as that part
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int p = 0; p <= smaller; p++) multiply_parts(part, a[step].part[p], b[step], smaller - p);
#pragma unroll
        for (int j = 0; j < FN; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] += part[j][e];
    }
}

DEVICE void multiply_stage(float (&sum)[FM][FN][4], Stage& stage, int row, int column) {
#pragma unroll
    for (int depth = 0; depth < BK; depth += STEP) {
        unsigned a[FM][4], b[FN / 2][4];
#pragma unroll
        for (int i = 0; i < FM; i++) load_fragments<true>(a[i], stage.a, row, 2 * i, depth);
#pragma unroll
        for (int j = 0; j < FN / 2; j++) load_fragments<false>(b[j], stage.b, column, 2 * j, depth);
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
            for (int j = 0; j < FN; j++) {
                const unsigned pair[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                multiply(T{}, sum[i][j], a[i], pair);
            }
    }
}

// Neighbouring lanes hold neighbouring pairs of the columns of each fragment. They exchange them until each has
// COUNT neighbours of one among COUNT / 2 fragments: which one, its number's last bits say.
template <int COUNT>
DEVICE void gather(float (&v)[COUNT], int lane) {
#pragma unroll
    for (int bit = 1; bit < COUNT / 2; bit *= 2) {
        const bool high = lane & bit;
#pragma unroll
        for (int low = 0; low < COUNT / 2; low++) {
            if (low & bit) continue;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &mine = v[2 * low + e], &further = v[2 * (low | bit) + e];
                const float other = shuffle_xor(high ? mine : further, bit);
                mine = high ? other : mine;
                further = high ? further : other;
            }
        }
    }
}

// A thread's part of the tile.
DEVICE void write_tile(const float (&sum)[FM][FN][4], int thread, int group, TileAt tile, const Output& to) {
    constexpr int COUNT = together(COPY), GATHERED = COUNT > 2 ? COUNT : 2, FRAGMENTS = GATHERED / 2;
#pragma unroll
    for (int i = 0; i < FM * 2; i++) {
        const int here = COUNT == 1 ? launder(thread) : thread;  // of single values, not all places are found at once
        const int lane = here % 32, warp = here / 32;
        const Offset row0 = Offset(tile.row) * BM + warp / WARPS_N * WM;
        const Offset column0 = Offset(tile.column) * BN + warp % WARPS_N * WN;
        const Offset row = row0 + i * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < FN; j += FRAGMENTS) {
            float v[GATHERED];
#pragma unroll
            for (int e = 0; e < GATHERED; e++) v[e] = sum[i / 2][j + e / 2][i % 2 * 2 + e % 2];
            gather(v, lane);
            const int pair = lane % 4 / FRAGMENTS * FRAGMENTS;  // the first of those gathered
            const Offset first = column0 + (j + lane % FRAGMENTS) * 8 + pair * 2;
#pragma unroll
            for (int part = 0; part < GATHERED; part += COUNT) {
                const Offset column = first + part;
                float some[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++) some[e] = v[part + e];
                if (row < ROWS && column < COLUMNS)
                    to.write(some, PIXEL_ROWS ? output_at(group, row, column) : output_at(group, column, row),
                             static_cast<int>(group * KG + column));
            }
        }
    }
}

// A block computes one tile of one group, over one SPLIT-th of the depth.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tensor(const T* a, const T* b, T* out, const T* bias, const T* residual, float* parts, unsigned* tickets) {
    SHARED_DYNAMIC(Stages, stages);
    const int group = static_cast<int>(blockIdx.z) / SPLIT, part = static_cast<int>(blockIdx.z) % SPLIT;
    const TileAt tile = tile_at<TILES_M, TILES_N>(static_cast<int>(blockIdx.x));
    const Offset row0 = Offset(tile.row) * BM, column0 = Offset(tile.column) * BN;
    using RowOperand = Either<PIXEL_ROWS, Pixels, Flat>;
    using ColumnOperand = Either<PIXEL_ROWS, Flat, Pixels>;
    const Feed<BM, A_BY_ROWS, RowOperand> rows({group}, PIXEL_ROWS ? a : b, row0);
    const Feed<BN, B_BY_ROWS, ColumnOperand> columns({group}, PIXEL_ROWS ? b : a, column0);
    constexpr int EACH = ceil_div(SLICES, SPLIT);
    const int first = part * EACH, last = first + EACH < SLICES ? first + EACH : SLICES;
    const auto fetch = [&](int slice, int stage) {
        if (slice < last) {
            rows.fetch(stages.at[stage].a, Offset(slice) * BK);
            columns.fetch(stages.at[stage].b, Offset(slice) * BK);
        }
        commit_copies();  // an empty group, too, so that the count of groups tells the slice
    };
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = fragments_from<decltype(Stage::a), A_BY_ROWS>(warp / WARPS_N * WM, lane);
    const int column = fragments_from<decltype(Stage::b), B_BY_ROWS>(warp % WARPS_N * WN, lane);
    float sum[FM][FN][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(first + i, i);
    int stage = 0;
    for (int slice = first; slice < last; slice++) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // the slice is there for all, and the stage before it is free
        fetch(slice + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        if constexpr (PRODUCTS > 1)
            multiply_stage_in_parts(sum, stages.at[stage], PLACES_ANEW ? launder(row) : row,
                                    PLACES_ANEW ? launder(column) : column);
        else
            multiply_stage(sum, stages.at[stage], row, column);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    // Nothing is on its way now: what was fetched beyond the last slice are empty groups. What is wanted from here on is
    // found again, and took no registers meanwhile.
    const Share my = share();
    const int x = block_x_again(), thread = thread_again();
    const long long index = my.group * (TILES_M * TILES_N) + x;
    const Team<FM * FN * 4, THREADS> team = {thread, 0, parts + index * (SPLIT * BM * BN), tickets + index * TICKETS};
    if (team.complete(flat<FM * FN * 4>(sum), my.part))
        write_tile(sum, thread, my.group, tile_at<TILES_M, TILES_N>(x), {out, bias, residual});
}
