// Direct convolution with images innermost: the product at one place of the output.

#include "chwn.cuh"
#include "../common/gemm_tile.cuh"

struct Tap {
    Offset x, w;  // where its first channel lies
};
struct Shared {
    Slices slices;
    Tap taps[R * S];
};
// The row, or column, of the input that a tap of an output meets, or a negative number.
DEVICE Offset met_h(Offset i, int r) {
    if constexpr (BACK) return output_of(i, r, PAD_TOP, STRIDE_H, DILATION_H, P);
    const Offset h = i * STRIDE_H - PAD_TOP + r * DILATION_H;
    return h < H ? h : -1;
}
DEVICE Offset met_w(Offset j, int s) {
    if constexpr (BACK) return output_of(j, s, PAD_LEFT, STRIDE_W, DILATION_W, Q);
    const Offset v = j * STRIDE_W - PAD_LEFT + s * DILATION_W;
    return v < W ? v : -1;
}

// Lists the taps that meet something, and says how many they are.
DEVICE int list_taps(Tap (&taps)[R * S], Offset i, Offset j) {
    int columns = 0, rows = 0;
    for (int s = 0; s < S; s++) columns += met_w(j, s) >= 0;
    for (int r = 0; r < R; r++) rows += met_h(i, r) >= 0;
    for (int tap = threadIdx.x; tap < TAPS; tap += PRODUCT_THREADS) {
        const int r = tap / static_cast<int>(S), s = tap % static_cast<int>(S);
        const Offset h = met_h(i, r), v = met_w(j, s);
        if (h < 0 || v < 0) continue;
        int before = 0;
        for (int other = 0; other < s; other++) before += met_w(j, other) >= 0;
        for (int other = 0; other < r; other++) before += met_h(i, other) >= 0 ? columns : 0;
        taps[before] = {(h * IN_W + v) * IMAGES, Offset(tap) * KEPT};
    }
    __syncthreads();
    return rows * columns;
}

// The operands: packed filters, and images, by the taps listed.
struct Listed {
    const Tap* taps;
    int group;
    Offset depth;

    // The channel and the tap of a depth, if there is such a one: where the channel and where the tap begins.
    template <class Begin>
    DEVICE Offset found(Offset k, Offset step, Begin begin) const {
        return k < depth ? (group * DEPTH + k % DEPTH) * step + begin(taps[k / DEPTH]) : OUTSIDE;
    }
    DEVICE static Position meet(Offset across, Offset along) { return sum_of(across, along); }
};
struct Filters : Listed {
    DEVICE Offset across(Offset row) const { return row < KEPT ? row : OUTSIDE; }
    DEVICE Offset along(Offset slice, int k) const {
        return found(slice + k, TAPS * KEPT, [](const Tap& tap) { return tap.w; });
    }
};
struct Images : Listed {
    DEVICE Offset across(Offset image) const { return image < IMAGES ? image : OUTSIDE; }
    DEVICE Offset along(Offset slice, int k) const {
        return found(slice + k, IN_H * IN_W * IMAGES, [](const Tap& tap) { return tap.x; });
    }
};

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, PRODUCT_BLOCKS)
chwn_product(const Acc* U, char* workspace, T* out, const T* bias, const T* residual) {
    SHARED(Shared, shared);
    constexpr Offset BATCHES = (IMAGES + BN - 1) / BN;
    const Offset place = static_cast<Offset>(blockIdx.x) / BATCHES, i = place / OUT_W, j = place % OUT_W;
    const int image0 = static_cast<int>(blockIdx.x % BATCHES) * BN, row0 = static_cast<int>(blockIdx.y) * BM;
    const int group = blockIdx.z;
    const Offset depth = list_taps(shared.taps, i, j) * DEPTH;
    Acc sum[TM][TN] = {};
    const Listed listed = {shared.taps, group, depth};
    multiply_tile<false, 4, false, 4>(
        sum, shared.slices, 0, static_cast<int>((depth + BK - 1) / BK), U, reinterpret_cast<const T*>(workspace),
        Filters{listed}, Offset(row0), Images{listed}, Offset(image0));
    if constexpr (LAST) {
        constexpr int RUN = ROWS % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int n = 0; n < TN; n++) {
            const int image = image0 + column_of(n);
            if (image >= N) continue;
#pragma unroll
            for (int k = 0; k < TM; k += RUN) {
                Acc run[RUN];
#pragma unroll
                for (int i = 0; i < RUN; i++) run[i] = sum[k + i][n];
                const int row = row0 + row_of(k), channel = static_cast<int>(group * ROWS) + row;
                if (row < ROWS) write_channels<RUN>(run, channel, out_at(image, channel, i, j), out, bias, residual);
            }
        }
    } else {
        Acc* Y = reinterpret_cast<Acc*>(workspace + Y_AT);
#pragma unroll
        for (int k = 0; k < TM; k++) {
            const int row = row0 + row_of(k);
            if (row >= ROWS) continue;
#pragma unroll
            for (int n = 0; n < TN; n += 4) {
                const int image = image0 + column_of(n);
                if (image >= IMAGES) continue;
                struct alignas(16) Run {
                    Acc value[4];
                } run = {{sum[k][n], sum[k][n + 1], sum[k][n + 2], sum[k][n + 3]}};
                aligned<Run>(Y + ((group * ROWS + row) * (OUT_H * OUT_W) + place) * IMAGES + image) = run;
            }
        }
    }
}
