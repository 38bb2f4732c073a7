// Implicit GEMM by Hopper's own means, NHWC. The copy engine walks through the pixels of x (or of dy) as a filter
// tap does and brings zeros where there are none; the tensor cores read both operands from shared memory.
//   fwd    y[(n,p,q), k]   = sum over (r,s,c)  of  x[(n,p,q) at (r,s), c]   w[k, (r,s), c]
//   dgrad dx[(n,h,w), c]   = sum over (r,s,k)  of dy[(n,h,w) at (r,s), k]   w[k, (r,s), c]
//   wgrad dw[k, (r,s), c]  = sum over (n,p,q)  of dy[(n,p,q), k]             x[(n,p,q) at (r,s), c]
// One warpgroup fetches, the others multiply: STAGES slices of the depth are on their way or in use, and a stage
// goes back when the products that read it are done, one group of which is always in flight. A block takes one
// tile after the other, so the next tile's slices come in while a finished one is written.
//
// With a stride, dgrad is a pass for each remainder of (h, w): only some taps meet it, and they do so as an
// unstrided convolution of dy does. PIXEL_* and TAP_* below are of a pass.

#include "hopper.cuh"

constexpr bool WEIGHTS = DIRECTION == WGRAD;
constexpr bool A_ACROSS = DIRECTION == WGRAD, B_ACROSS = DIRECTION != FWD;
constexpr int LINE = LINE_BYTES / sizeof(T);  // values to a line
constexpr int BK = LINE;
constexpr int STEP = 32 / sizeof(T);          // depth of one matrix instruction
constexpr int WARPGROUP = 128;
constexpr int WM = BM / CONSUMERS, FM = WM / 64;
static_assert(THREADS == (CONSUMERS + 1) * WARPGROUP && WM % 64 == 0 && BN % 64 == 0, "whole warpgroups");
static_assert(!B_ACROSS || LINE == 64, "lines across the depth are of 16-bit values");

constexpr int PIXELS = static_cast<int>(N) * PIXEL_ROWS * PIXEL_COLUMNS;
constexpr int TAPS = TAPS_H * TAPS_W;
constexpr int CHANNELS = DIRECTION == DGRAD ? KG : CG;  // of one group, in the array of pixels
constexpr int ROWS = WEIGHTS ? KG : PIXELS;
constexpr int COLUMNS = DIRECTION == FWD ? KG : CG;     // of one group; of one tap, for wgrad
constexpr int CHUNKS = ceil_div(CHANNELS, BK);
constexpr int SLICES = WEIGHTS ? ceil_div(PIXELS, BK) : TAPS * CHUNKS;
constexpr int EACH = ceil_div(SLICES, SPLIT);
constexpr int TILES_M = ceil_div(ROWS, BM), TILES_N = ceil_div(COLUMNS, BN) * (WEIGHTS ? TAPS : 1);
constexpr int TILES = TILES_M * TILES_N;
constexpr int WORK = TILES * GROUPS * SPLIT;
constexpr int STRIP = 8;  // tiles side by side that blocks take together, so that they meet in the L2
constexpr long long OUTPUTS[] = {(long long)N * P * Q * K, (long long)N * H * W * C, (long long)K * R * S * CG};
constexpr long long TOTAL = OUTPUTS[DIRECTION];

struct Stage {
    alignas(ATOM_BYTES) T a[BM * BK];
    alignas(ATOM_BYTES) T b[BN * BK];
};
struct Shared {
    Stage stage[STAGES];
    Barrier full[STAGES], empty[STAGES];
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
};

struct Job {
    int group, part, row, column, tap;
    DEVICE int first() const { return part * EACH; }  // no less than last() for a part without slices
    DEVICE int last() const { return (part + 1) * EACH < SLICES ? (part + 1) * EACH : SLICES; }
};
DEVICE Job job(int index) {
    const int tile = index % TILES, strip = tile / (TILES_M * STRIP), within = tile % (TILES_M * STRIP);
    const int width = TILES_N - strip * STRIP < STRIP ? TILES_N - strip * STRIP : STRIP;
    const int m = within / width, n = strip * STRIP + within % width;
    constexpr int PER_TAP = ceil_div(COLUMNS, BN);
    return {index / TILES % GROUPS, index / TILES / GROUPS, m * BM, n % PER_TAP * BN, n / PER_TAP};
}

DEVICE void fetch_from(T* to, const TensorMap& map, Barrier& barrier, int channel, int place, int tap) {
    const int image = place / (PIXEL_ROWS * PIXEL_COLUMNS), row = place / PIXEL_COLUMNS % PIXEL_ROWS;
    fetch_pixels(to, map, barrier, channel, place % PIXEL_COLUMNS * PIXEL_STRIDE_W + PIXEL_LOW_W,
                 row * PIXEL_STRIDE_H + PIXEL_LOW_H, image, tap % TAPS_W * TAP_STRIDE_W, tap / TAPS_W * TAP_STRIDE_H);
}

DEVICE void fetch_slice(Stage& stage, Barrier& barrier, const TensorMap& pixels, const TensorMap& other, Job at,
                        int slice) {
    if constexpr (WEIGHTS) {
        const int place = slice * BK;
#pragma unroll
        for (int i = 0; i < BM; i += LINE)
            fetch_box(stage.a + i * BK, other, barrier, at.group * KG + at.row + i, place, 0);
#pragma unroll
        for (int i = 0; i < BN; i += LINE)
            fetch_from(stage.b + i * BK, pixels, barrier, at.group * CG + at.column + i, place, at.tap);
    } else {
        const int tap = slice / CHUNKS, channel = slice % CHUNKS * BK;
        const int r = FIRST_R + tap / TAPS_W * NEXT_R, s = FIRST_S + tap % TAPS_W * NEXT_S;
        const int filter_tap = r * static_cast<int>(S) + s;
        fetch_from(stage.a, pixels, barrier, at.group * CHANNELS + channel, at.row, tap);
        if constexpr (DIRECTION == FWD) {
            fetch_box(stage.b, other, barrier, channel, filter_tap, at.group * KG + at.column);
        } else {
#pragma unroll
            for (int i = 0; i < BN; i += LINE)
                fetch_box(stage.b + i * BK, other, barrier, at.column + i, filter_tap, at.group * KG + channel);
        }
    }
}

DEVICE void produce(Shared& shared, const TensorMap& pixels, const TensorMap& other) {
    Turn turn;
    for (int index = static_cast<int>(blockIdx.x); index < WORK; index += static_cast<int>(gridDim.x)) {
        const Job at = job(index);
        for (int slice = at.first(); slice < at.last(); slice++) {
            Barrier& full = shared.full[turn.stage];
            await(shared.empty[turn.stage], turn.parity ^ 1);  // at first, "the phase before" has ended
            arrive_expecting(full, sizeof(Stage));
            fetch_slice(shared.stage[turn.stage], full, pixels, other, at, slice);
            turn.next();
        }
    }
}

DEVICE void multiply_stage(float (&sum)[FM][BN / 2], Stage& stage, int row) {
    constexpr int BLOCK = LINE * BK * sizeof(T);  // where lines run across the depth: what one copy brought
    const Word a = matrix_at(stage.a + row * BK, A_ACROSS ? BLOCK : 16), b = matrix_at(stage.b, B_ACROSS ? BLOCK : 16);
#pragma unroll
    for (int depth = 0; depth < BK; depth += STEP)
#pragma unroll
        for (int i = 0; i < FM; i++)
            multiply_async<A_ACROSS, B_ACROSS>(
                T{}, sum[i], a + further(i * 64 * LINE_BYTES + depth * (A_ACROSS ? LINE_BYTES : int(sizeof(T)))),
                b + further(depth * (B_ACROSS ? LINE_BYTES : int(sizeof(T)))));
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

// Eight neighbouring sums, from this column of the group's on; `room` of them exist, or none where it is negative.
DEVICE void write(const float (&v)[8], T* out, const T* bias, const T* residual, float* partial, Offset at, int k,
                  int room) {
    constexpr int LAST = DIRECTION == FWD ? KG : CG;
    if constexpr (SPLIT > 1) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            if (LAST % 4 == 0) {
                if (i < room) aligned<Run<float>>(partial + at + i) = {v[i], v[i + 1], v[i + 2], v[i + 3]};
            } else {
#pragma unroll
                for (int e = i; e < i + 4; e++)
                    if (e < room) partial[at + e] = v[e];
            }
        }
    } else if constexpr (LAST % (16 / sizeof(T)) == 0) {
        constexpr int WIDE = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < 8; i += WIDE) {
            if (i >= room) break;
            Run<T> b = {}, r = {}, y;
            if constexpr (BIAS) b = aligned<Run<T>>(bias + k + i);
            if constexpr (RESIDUAL) r = aligned<Run<T>>(residual + at + i);
#pragma unroll
            for (int e = 0; e < WIDE; e++) y.value[e] = finished(v[i + e], b.value, r.value, e, e);
            aligned<Run<T>>(out + at + i) = y;
        }
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < room) out[at + e] = finished(v[e], bias, residual, k + e, at + e);
    }
}

// Where a row of the product begins in the output.
DEVICE Offset row_at(Job at, int row) {
    if constexpr (WEIGHTS) return (Offset(at.group * KG + row) * TAPS + at.tap) * CG;
    if constexpr (DIRECTION == FWD) return Offset(row) * K + at.group * KG;
    const int image = row / (PIXEL_ROWS * PIXEL_COLUMNS);
    const Offset h = row / PIXEL_COLUMNS % PIXEL_ROWS * STRIDE_H + OFFSET_H, v = row % PIXEL_COLUMNS * STRIDE_W + OFFSET_W;
    return x_at(image, at.group * CG, h, v);
}

DEVICE void write_tile(float (&sum)[FM][BN / 2], Job at, int row, T* out, const T* bias, const T* residual,
                       float* partial) {
    float* part = partial + (SPLIT > 1 ? at.part * TOTAL : 0);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int y = at.row + row + i * 64 + warp * 16 + half * 8 + lane / 4;
            const Offset start = row_at(at, y);
#pragma unroll
            for (int j = 0; j < BN / 32; j++) {
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] = sum[i][j * 16 + e / 2 * 4 + half * 2 + e % 2];
                gather(v, lane);
                const int x = at.column + j * 32 + lane % 4 * 8;
                if (y < ROWS) write(v, out, bias, residual, part, start + x, at.group * KG + x, COLUMNS - x);
            }
        }
}

DEVICE void consume(Shared& shared, T* out, const T* bias, const T* residual, float* partial) {
    const int row = static_cast<int>(threadIdx.x) / WARPGROUP * WM;
    const bool first_lane = threadIdx.x % 32 == 0;
    Turn turn;
    for (int index = static_cast<int>(blockIdx.x); index < WORK; index += static_cast<int>(gridDim.x)) {
        const Job at = job(index);
        const int first = at.first(), last = at.last();
        float sum[FM][BN / 2] = {};
        int used = 0;  // the stage before
        for (int slice = first; slice < last; slice++) {
            await(shared.full[turn.stage], turn.parity);
            fence_products();
            multiply_stage(sum, shared.stage[turn.stage], row);
            commit_products();
            wait_products<1>();
            if (slice > first && first_lane) arrive(shared.empty[used]);
            used = turn.stage;
            turn.next();
        }
        wait_products<0>();
        if (last > first && first_lane) arrive(shared.empty[used]);
#pragma unroll
        for (int i = 0; i < FM; i++) settle(sum[i]);
        write_tile(sum, at, row, out, bias, residual, partial);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
hopper(const GRID_CONSTANT TensorMap pixels, const GRID_CONSTANT TensorMap other, T* out, const T* bias,
       const T* residual, float* partial) {
    SHARED_DYNAMIC(Shared, shared);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            init_barrier(shared.full[i], 1);
            init_barrier(shared.empty[i], CONSUMERS * WARPGROUP / 32);  // a lane of each warp
        }
        fence_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS * WARPGROUP) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARPGROUP) produce(shared, pixels, other);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        consume(shared, out, bias, residual, partial);
    }
}

// The sum of the parts, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
hopper_sum(const float* partial, T* out, const T* bias, const T* residual) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= TOTAL) return;
    float sum = 0;
#pragma unroll 4
    for (int part = 0; part < SPLIT; part++) sum += partial[part * TOTAL + index];
    out[index] = finished(sum, bias, residual, static_cast<int>(index % K), static_cast<Offset>(index));
}
