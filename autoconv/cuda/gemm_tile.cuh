// A tile of a matrix product in scalar arithmetic: BM x BN of it to a block, BK deep at a time.
// A warp computes 4 TM x 8 TN of the tile, its lanes being 4 x 8, in pieces of 4 x 4 whose rows and
// columns are read from shared memory as 128-bit words: broadcast along the other axis, no bank conflicts.
// The next slice travels through registers to the other half of shared memory: one barrier to a slice.

constexpr int WARP_M = 4 * TM, WARP_N = 8 * TN;
static_assert(BM % WARP_M == 0 && BN % WARP_N == 0 && PRODUCT_THREADS == BM / WARP_M * (BN / WARP_N) * 32, "whole warps");
static_assert(TM % 4 == 0 && TN % 4 == 0, "pieces of 4 x 4");

struct Slices {
    alignas(16) Acc a[2][BK][BM + 4];  // the 4 spread columns of one row over the banks
    alignas(16) Acc b[2][BK][BN + 4];
};

// One operand's slice: EXTENT x BK, in runs of RUN neighbours along k or across it.
template <int EXTENT, bool ALONG_K, int RUN>
struct Slice {
    static constexpr int TOTAL = EXTENT * BK / RUN, COUNT = ceil_div(TOTAL, PRODUCT_THREADS);
    Acc value[COUNT][RUN];

    // The run's first position: across k, and along it.
    DEVICE static int across(int thread, int i) {
        const int run = thread + i * PRODUCT_THREADS;
        return ALONG_K ? run / (BK / RUN) : run % (EXTENT / RUN) * RUN;
    }
    DEVICE static int along(int thread, int i) {
        const int run = thread + i * PRODUCT_THREADS;
        return ALONG_K ? run % (BK / RUN) * RUN : run / (EXTENT / RUN);
    }
    DEVICE static bool exists(int thread, int i) {
        return TOTAL % PRODUCT_THREADS == 0 || thread + i * PRODUCT_THREADS < TOTAL;
    }

    // `place(across, along)` is where a run begins in `from`, or negative where it is zero.
    template <class Element, class Place>
    DEVICE void fetch(const Element* from, Place place) {
        const int thread = opaque(threadIdx.x);  // places take more registers to keep than work to find again
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const Offset run = exists(thread, i) ? place(across(thread, i), along(thread, i)) : -1;
            load_run(value[i], run < 0 ? nullptr : from + run);
        }
    }

    DEVICE void store(Acc (*rows)[EXTENT + 4]) const {
        const int thread = threadIdx.x;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < RUN; j++)
                if (exists(thread, i)) rows[along(thread, i) + (ALONG_K ? j : 0)][across(thread, i) + (ALONG_K ? 0 : j)] = value[i][j];
    }
};

DEVICE int warp_row() { return static_cast<int>(threadIdx.x) / 32 / (BN / WARP_N) * WARP_M; }
DEVICE int warp_column() { return static_cast<int>(threadIdx.x) / 32 % (BN / WARP_N) * WARP_N; }
// The tile's row and column of a thread's piece `i`.
DEVICE int row_of(int i) { return warp_row() + i / 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 8 * 4 + i % 4; }
DEVICE int column_of(int j) { return warp_column() + j / 4 * 32 + static_cast<int>(threadIdx.x) % 8 * 4 + j % 4; }

DEVICE void multiply_slice(Acc (&sum)[TM][TN], const Slices& slices, int half) {
#pragma unroll
    for (int k = 0; k < BK; k++) {
        Acc a[TM], b[TN];
#pragma unroll
        for (int i = 0; i < TM; i += 4) read4(&a[i], &slices.a[half][k][row_of(i)]);
#pragma unroll
        for (int j = 0; j < TN; j += 4) read4(&b[j], &slices.b[half][k][column_of(j)]);
#pragma unroll
        for (int i = 0; i < TM; i++)
#pragma unroll
            for (int j = 0; j < TN; j++) sum[i][j] += a[i] * b[j];
    }
}

// sum += A B over slices first ... last - 1; `place_a(row, k)` and `place_b(column, k)` as in `Slice::fetch`.
template <bool A_ALONG_K, int A_RUN, bool B_ALONG_K, int B_RUN, class A, class B, class PlaceA, class PlaceB>
DEVICE void multiply_tile(Acc (&sum)[TM][TN], Slices& slices, int first, int last, const A* matrix_a, const B* matrix_b,
                          PlaceA place_a, PlaceB place_b) {
    Slice<BM, A_ALONG_K, A_RUN> a;
    Slice<BN, B_ALONG_K, B_RUN> b;
    const auto fetch = [&](int slice) {
        a.fetch(matrix_a, [&](int row, int k) { return place_a(row, Offset(slice) * BK + k); });
        b.fetch(matrix_b, [&](int column, int k) { return place_b(column, Offset(slice) * BK + k); });
    };
    const auto store = [&](int half) {
        a.store(slices.a[half]);
        b.store(slices.b[half]);
    };
    if (first >= last) return;
    fetch(first);
    store(0);
    __syncthreads();
    for (int slice = first; slice < last; slice++) {
        const int half = (slice - first) & 1;
        if (slice + 1 < last) fetch(slice + 1);
        multiply_slice(sum, slices, half);
        if (slice + 1 < last) store(half ^ 1);
        __syncthreads();
    }
}
