// The gradient of depthwise filters: every tap is a sum over all places of the output, of which there are many, and there
// are few taps. A block sums one row of a filter (NCHW), or of 32 neighbouring filters (NHWC), over one SPLIT-th of the
// places.

#include "../common/implicit.cuh"
#include "../common/split.cuh"

constexpr bool LAST = LAYOUT == NHWC;  // channels are neighbours: a lane has one to itself; else it has a place
constexpr int WARPS = THREADS / 32, FILTERS = LAST ? 32 : 1, AT_ONCE = LAST ? WARPS : THREADS;  // of a block; places
constexpr int SUMS = S * FILTERS, COUNT = ceil_div(SUMS, THREADS);  // of a block, and to a thread
constexpr Offset PLACES = N * P * Q, SLICES = (PLACES + AT_ONCE - 1) / AT_ONCE;
constexpr Offset EACH = (SLICES + SPLIT - 1) / SPLIT * AT_ONCE;

struct Sums {
    Acc at[WARPS][S][32];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
depthwise_wgrad(const T* x, const T* dy, T* dw, const T* bias, const T* residual, Acc* parts,
                unsigned* tickets) {
    SHARED(Sums, sums);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int r = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.z);
    const int k = static_cast<int>(blockIdx.x) * FILTERS + (LAST ? lane : 0);
    const Offset first = part * EACH, last = first + EACH < PLACES ? first + EACH : PLACES;
    Acc sum[S] = {};
    if (k < K) {
        for (Offset at = first + (LAST ? warp : static_cast<int>(threadIdx.x)); at < last; at += AT_ONCE) {
            const Place y = place(at, P, Q);
            const Offset h = y.i * STRIDE_H - PAD_TOP + r * DILATION_H;
            if (!within(h, H)) continue;
            const Acc gradient = Acc(to_float(dy[y_at(y.n, k, y.i, y.j)]));
#pragma unroll
            for (int s = 0; s < S; s++) {
                const Offset v = y.j * STRIDE_W - PAD_LEFT + s * DILATION_W;
                if (within(v, W)) sum[s] += Acc(to_float(x[x_at(y.n, k / KG, h, v)])) * gradient;
            }
        }
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
        if constexpr (!LAST) {
#pragma unroll
            for (int mask = 16; mask; mask /= 2) sum[s] += shuffle_xor(sum[s], mask);
        }
        sums.at[warp][s][lane] = sum[s];
    }
    __syncthreads();
    Acc total[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * THREADS + static_cast<int>(threadIdx.x);
        total[i] = 0;
        for (int each = 0; each < WARPS && at < SUMS; each++) total[i] += sums.at[each][at / FILTERS][at % FILTERS];
    }
    const int tile = static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y);
    const Team<COUNT, THREADS> team = {static_cast<int>(threadIdx.x), 0, parts + tile * (SPLIT * COUNT * THREADS),
                                       tickets + tile * TICKETS};
    if (!team.complete(total, part)) return;
    const Output to = {dw, bias, residual};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * THREADS + static_cast<int>(threadIdx.x);
        const int filter = static_cast<int>(blockIdx.x) * FILTERS + at % FILTERS;
        const Acc one[1] = {total[i]};
        if (at < SUMS && filter < K) to.write(one, w_at(filter, 0, r, at / FILTERS), filter);
    }
}
