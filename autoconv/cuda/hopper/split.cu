// float32 in nearly full accuracy: a number is the sum of three bfloat16 numbers, which are all of it, and a product
// that of the six largest of theirs. Rows of the product come as float32 and are split on their way to the registers,
// from where the tensor cores take them; columns come split. Filters are split once, when they are packed, the pixels
// that wgrad has as columns by a kernel before. Tensor cores cut off what they add, always towards zero, so a long sum
// in them would drift: they sum STEP products of each kind alone, the small ones first, and these sums are added by
// rounding additions, while the other warpgroups' products are under way.
#include "parts.cuh"
#include "tiles.cuh"

constexpr bool B_ACROSS = WEIGHTS;
constexpr int PART_LINE_BYTES = WEIGHTS ? LINE_BYTES : BK * int(sizeof(bfloat16_t));
constexpr int PART_LINE = PART_LINE_BYTES / int(sizeof(bfloat16_t));
static_assert(!WEIGHTS || PART_LINE == WIDTH, "lines across the depth are what comes at once");
static_assert(sizeof(T) == 4 && BK == 2 * STEP, "two steps to a line of float32");

struct Stage {
    alignas(ATOM_BYTES) T a[BM * BK];
    alignas(ATOM_BYTES) bfloat16_t b[PARTS][BN * BK];

    // Which row of eight a lane's fragments are of. Where a row is a line, the eight lanes that read together have half of
    // two of them: of two that are four apart, for which the swizzle has other banks.
    DEVICE static int row_of_eight(int lane) { return ROWS_ACROSS ? lane / 4 : lane / 8 + lane / 4 % 2 * 4; }
};

DEVICE void fetch_columns(Stage& stage, Barrier& barrier, const TensorMap& pixels, const TensorMap& other, Job at,
                          int slice) {
    if constexpr (WEIGHTS) {
        // each part is an array of images behind the last; what a slice has too much meets zeros of dy
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int i = 0; i < BN; i += PART_LINE)
                fetch_tap(stage.b[part] + i * BK, pixels, barrier, at, i, slice * BK + part * PIXELS);
    } else {
        const Depth depth = depth_of(slice);
        const int block = (depth.filter_tap * static_cast<int>(GROUPS) + at.group) * CHUNKS + depth.chunk;
        fetch_box(stage.b, other, barrier, 0, at.column, block * PARTS);
    }
}

// Where a lane reads what it multiplies one by one, the order of a step is its own.
DEVICE int held(int place) { return ROWS_ACROSS ? place : depth_at(place); }

// Sixteen rows and STEP of depth to a warp: v[4 half + e] is of the lane's row of that eight, and its e-th depth.
DEVICE void load_rows(float (&v)[8], const Stage& stage, int row, int depth) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int of_eight = Stage::row_of_eight(lane);
    const int first = row + warp * 16 + of_eight;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if constexpr (ROWS_ACROSS) {
            const int mine = first + half * 8;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int line = depth + lane % 4 * 2 + e / 2 * 8 + e % 2;
                const int chunk = mine % LINE / 4 ^ line % 8;
                v[4 * half + e] = stage.a[mine / LINE * (LINE * BK) + line * LINE + chunk * 4 + mine % 4];
            }
        } else {
            const int chunk = (depth / 4 + lane % 4) ^ of_eight;
            read4(&v[4 * half], stage.a + (first + half * 8) * LINE + chunk * 4);
        }
    }
}

struct Fragments {
    unsigned part[PARTS][4];  // the largest first

    DEVICE explicit Fragments(const float (&v)[8]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int pair = i % 2 * 4 + i / 2 * 2;
            float low = v[pair], high = v[pair + 1];
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const unsigned both = part[p][i] = to_bfloat16_pair(low, high);
                low -= bits_float(both << 16);
                high -= bits_float(both & 0xffff0000u);
            }
        }
    }
};

// sum += a b, over STEP of depth
DEVICE void multiply_step(float (&sum)[BN / 2], const Fragments& a, Stage& stage, int depth) {
    constexpr int BLOCK = PART_LINE * BK * sizeof(bfloat16_t);  // where lines run across the depth: of one copy
    Word b[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        b[p] = matrix_at<PART_LINE_BYTES>(stage.b[p], B_ACROSS ? BLOCK : 16) +
               further(depth * (B_ACROSS ? PART_LINE_BYTES : int(sizeof(bfloat16_t))));
    float part[BN / 2];
    fence_products();
    multiply_held<B_ACROSS, true>(bfloat16_t{}, part, a.part[2], b[0]);
    multiply_held<B_ACROSS, false>(bfloat16_t{}, part, a.part[1], b[1]);
    multiply_held<B_ACROSS, false>(bfloat16_t{}, part, a.part[0], b[2]);
    multiply_held<B_ACROSS, false>(bfloat16_t{}, part, a.part[1], b[0]);
    multiply_held<B_ACROSS, false>(bfloat16_t{}, part, a.part[0], b[1]);
    multiply_held<B_ACROSS, false>(bfloat16_t{}, part, a.part[0], b[0]);
    commit_products();
    wait_products<0>();
    settle(part);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) sum[i] += part[i];
}

DEVICE void multiply_slices(float (&sum)[FM][BN / 2], Ring<Stage>& ring, Turn& turn, Job at, int row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int slice = at.first(); slice < at.last(); slice++) {
        await(ring.full[turn.stage], turn.parity);
        Stage& stage = ring.stage[turn.stage];
#pragma unroll
        for (int depth = 0; depth < BK; depth += STEP)
#pragma unroll
            for (int i = 0; i < FM; i++) {
                float v[8];
                load_rows(v, stage, row + i * 64, depth);
                multiply_step(sum[i], Fragments(v), stage, depth);
            }
        if (lane == 0) arrive(ring.empty[turn.stage]);
        turn.next();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
split(const GRID_CONSTANT TensorMap pixels, const GRID_CONSTANT TensorMap other, T* out, const T* bias,
      const T* residual, Acc* parts, unsigned* tickets) {
    SHARED_DYNAMIC(Ring<Stage>, ring);
    run_block(ring, pixels, other, {out, bias, residual}, {parts, tickets});
}

// Filters for fwd and dgrad: to each tap, group and BK of the depth, the parts of all columns in lines of BK. A thread has
// eight of a line, half of a step: of a filter that lies along the depth, four pairs of neighbours.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
split_filters(const T* w, bfloat16_t* to) {
    constexpr int EIGHT = 8;
    const Offset index = (Offset(blockIdx.x) * THREADS + threadIdx.x) * EIGHT;
    constexpr Offset PART = COLUMNS * BK;
    const Offset line = index % PART, block = index / PART;
    if (block >= GROUPS * R * S * CHUNKS) return;
    const int place = static_cast<int>(line % BK), column = static_cast<int>(line / BK);
    const int depth0 = static_cast<int>(block % CHUNKS) * BK + place / STEP * STEP;
    const int tap = static_cast<int>(block / CHUNKS / GROUPS), group = static_cast<int>(block / CHUNKS % GROUPS);
    const Offset r = tap / static_cast<int>(S), s = tap % static_cast<int>(S);
    float values[EIGHT];
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        const int depth = depth0 + held(place % STEP + i);
        const int k = group * KG + (DIRECTION == FWD ? column : depth), c = DIRECTION == FWD ? depth : column;
        values[i] = depth < CHANNELS ? w[w_at(k, c, r, s)] : 0.f;
    }
    put_parts(to + block * (PARTS * PART) + line, PART, values);
}

// The pixels of wgrad: all of each part, channels in whole runs of sixteen bytes.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
split_pixels(const T* x, bfloat16_t* to) {
    constexpr Offset LENGTH = (C + 7) / 8 * 8, ALL = N * H * W * LENGTH;
    const Offset at = (Offset(blockIdx.x) * THREADS + threadIdx.x) * 4;
    if (at >= ALL) return;
    const Offset c = at % LENGTH;
    const T* const from = x + at / LENGTH * C + c;
    float v[4] = {};
    if constexpr (C % 4 == 0) {
        if (c < C) read4(v, from);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (c + i < C) v[i] = to_float(from[i]);
    }
    put_parts(to + at, ALL, v);
}
