// Products of 16-bit numbers, or of float32 as tf32: the tensor cores read both operands from shared memory. One group
// of products is always in flight. Of tf32 they take both along a contiguous depth, so dgrad's filters are packed so:
// w[c, (r,s), k].
#include "tiles.cuh"

constexpr bool A_ACROSS = ROWS_ACROSS, B_ACROSS = WEIGHTS || (DIRECTION == DGRAD && sizeof(T) == 2);
constexpr int STEP = 32 / sizeof(T);  // depth of one matrix instruction
static_assert(!B_ACROSS || LINE == WIDTH, "lines across the depth are of 16-bit values");

struct Stage {
    alignas(ATOM_BYTES) T a[BM * BK];
    alignas(ATOM_BYTES) T b[BN * BK];

    DEVICE static int row_of_eight(int lane) { return lane / 4; }
};

DEVICE void fetch_columns(Stage& stage, Barrier& barrier, const TensorMap& pixels, const TensorMap& other, Job at,
                          int slice) {
    if constexpr (WEIGHTS) {
#pragma unroll
        for (int i = 0; i < BN; i += LINE) fetch_tap(stage.b + i * BK, pixels, barrier, at, i, slice * BK);
    } else {
        const Depth depth = depth_of(slice);
        const int channel = depth.chunk * BK;
        if constexpr (!B_ACROSS) {
            fetch_box(stage.b, other, barrier, channel, depth.filter_tap, at.group * COLUMNS + at.column);
        } else {
#pragma unroll
            for (int i = 0; i < BN; i += LINE)
                fetch_box(stage.b + i * BK, other, barrier, at.column + i, depth.filter_tap, at.group * KG + channel);
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

DEVICE void multiply_slices(float (&sum)[FM][BN / 2], Ring<Stage>& ring, Turn& turn, Job at, int row) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = at.first(), last = at.last();
    int used = 0;  // the stage before
    for (int slice = first; slice < last; slice++) {
        await(ring.full[turn.stage], turn.parity);
        fence_products();
        multiply_stage(sum, ring.stage[turn.stage], row);
        commit_products();
        wait_products<1>();
        if (slice > first && lane == 0) arrive(ring.empty[used]);
        used = turn.stage;
        turn.next();
    }
    wait_products<0>();
    if (last > first && lane == 0) arrive(ring.empty[used]);
#pragma unroll
    for (int i = 0; i < FM; i++) settle(sum[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
hopper(const GRID_CONSTANT TensorMap pixels, const GRID_CONSTANT TensorMap other, T* out, const T* bias,
       const T* residual, Acc* parts, unsigned* tickets) {
    SHARED_DYNAMIC(Ring<Stage>, ring);
    run_block(ring, pixels, other, {out, bias, residual}, {parts, tickets});
}

// Filters by the channels of x, of a group's: for dgrad in tf32.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
turn_filters(const T* w, T* to) {
    const Offset index = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= C * (R * S) * KG) return;
    const Offset k = index % KG, tap = index / KG % (R * S), c = index / KG / (R * S);
    to[index] = w[((c / CG * KG + k) * (R * S) + tap) * CG + c % CG];
}
