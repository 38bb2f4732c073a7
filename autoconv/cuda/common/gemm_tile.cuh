// A tile of a matrix product in scalar arithmetic: BM x BN of it to a block, BK deep at a time.
// A warp computes 4 TM x 8 TN of the tile, its lanes being 4 x 8, in pieces of 4 x 4 whose rows and
// columns are read from shared memory as 128-bit words: broadcast along the other axis, no bank conflicts.
// The next slice travels through registers to the other half of shared memory: one barrier to a slice.
#pragma once
#include "common.cuh"

constexpr int WARP_M = 4 * TM, WARP_N = 8 * TN;
static_assert(BM % WARP_M == 0 && BN % WARP_N == 0 && PRODUCT_THREADS == BM / WARP_M * (BN / WARP_N) * 32, "whole warps");
static_assert(TM % 4 == 0 && TN % 4 == 0, "pieces of 4 x 4");

struct Slices {
    alignas(16) Acc a[2][BK][BM + 4];  // the 4 spread columns of one row over the banks
    alignas(16) Acc b[2][BK][BN + 4];
};

// One operand's slice: EXTENT x BK, in runs of RUN neighbours along k or across it. The operand says what lies
// `across` and `along` the depth, and where the two `meet` in memory: at a negative number, where there are zeros.
template <int EXTENT, bool ALONG_K, int RUN, class Operand>
struct Slice {
    static constexpr int TOTAL = EXTENT * BK / RUN, COUNT = ceil_div(TOTAL, PRODUCT_THREADS);
    static constexpr int EACH = (ALONG_K ? BK : EXTENT) / RUN;  // runs that lie one after the other
    static constexpr bool REGULAR = PRODUCT_THREADS % EACH == 0;
    // How many lines a thread meets, and whether what it knows of them is kept from slice to slice: so much of it
    // as would take more registers is found again.
    using Line = decltype(Operand{}.across(0));
    static constexpr int LINES = !ALONG_K && REGULAR ? 1 : COUNT;
    static constexpr bool KEPT = LINES * sizeof(Line) <= 3 * sizeof(Offset);
    Operand operand;
    Offset start;
    Line kept[LINES];
    Acc value[COUNT][RUN];

    DEVICE Slice(Operand of, Offset from) : operand(of), start(from) {
#pragma unroll
        for (int i = 0; i < LINES; i++) kept[i] = operand.across(start + across(threadIdx.x, i));
    }

    // Which of those runs, and which such row of them; the compiler does not find by itself that they are regular.
    DEVICE static int inner(unsigned thread, int i) {
        return static_cast<int>((REGULAR ? thread : thread + i * PRODUCT_THREADS) % EACH * RUN);
    }
    DEVICE static int outer(unsigned thread, int i) {
        if constexpr (REGULAR) return static_cast<int>(thread / EACH) + i * (PRODUCT_THREADS / EACH);
        return static_cast<int>((thread + i * PRODUCT_THREADS) / EACH);
    }
    // The run's first position: across k, and along it.
    DEVICE static int across(unsigned thread, int i) { return ALONG_K ? outer(thread, i) : inner(thread, i); }
    DEVICE static int along(unsigned thread, int i) { return ALONG_K ? inner(thread, i) : outer(thread, i); }
    DEVICE static bool exists(int thread, int i) {
        return TOTAL % PRODUCT_THREADS == 0 || thread + i * PRODUCT_THREADS < TOTAL;
    }

    template <class Element>
    DEVICE void fetch(const Element* from, Offset depth) {
        const int thread = KEPT ? threadIdx.x : launder(threadIdx.x);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const Line line = KEPT ? kept[LINES == 1 ? 0 : i] : operand.across(start + across(thread, i));
            const Offset run = exists(thread, i) ? operand.meet(line, operand.along(depth + along(thread, i))) : -1;
            load_run(value[i], from, run);
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

DEVICE int warp_row(unsigned thread) { return static_cast<int>(thread / 32 / (BN / WARP_N) * WARP_M); }
DEVICE int warp_column(unsigned thread) { return static_cast<int>(thread / 32 % (BN / WARP_N) * WARP_N); }
// The tile's row and column of a thread's piece `i`.
DEVICE int row_of(int i, unsigned thread = threadIdx.x) {
    return warp_row(thread) + i / 4 * 16 + static_cast<int>(thread % 32 / 8) * 4 + i % 4;
}
DEVICE int column_of(int j, unsigned thread = threadIdx.x) {
    return warp_column(thread) + j / 4 * 32 + static_cast<int>(thread % 8) * 4 + j % 4;
}

// Over half of a slice: of more, too much would be read ahead for the registers. Blackwell's compiler wants less,
// and so does each where a single slice leaves no loop around it.
#if __CUDA_ARCH__ >= 1000
template <bool LOOPS>
constexpr int AHEAD = 2;
#else
template <bool LOOPS>
constexpr int AHEAD = LOOPS ? BK / 2 : 2;
#endif
template <bool LOOPS>
DEVICE void multiply_slice(Acc (&sum)[TM][TN], const Slices& slices, int half, int first) {
#pragma unroll AHEAD<LOOPS>
    for (int k = first; k < first + BK / 2; k++) {
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

// sum += A B over slices first ... last - 1, from this row and this column on; operands as `Slice` wants them.
// `LOOPS` is false where there is only one slice, and the compiler knows.
template <bool A_ALONG_K, int A_RUN, bool B_ALONG_K, int B_RUN, bool LOOPS = true, class ElementA, class ElementB,
          class A, class B>
DEVICE void multiply_tile(Acc (&sum)[TM][TN], Slices& slices, int first, int last, const ElementA* matrix_a,
                          const ElementB* matrix_b, A operand_a, Offset row, B operand_b, Offset column) {
    Slice<BM, A_ALONG_K, A_RUN, A> a(operand_a, row);
    Slice<BN, B_ALONG_K, B_RUN, B> b(operand_b, column);
    const auto store = [&](int half) {
        a.store(slices.a[half]);
        b.store(slices.b[half]);
    };
    if (first >= last) return;
    a.fetch(matrix_a, Offset(first) * BK);
    b.fetch(matrix_b, Offset(first) * BK);
    store(0);
    __syncthreads();
    for (int slice = first; slice < last; slice++) {
        const int half = (slice - first) & 1;
        if (slice + 1 < last) a.fetch(matrix_a, Offset(slice + 1) * BK);
        multiply_slice<LOOPS>(sum, slices, half, 0);
        if (slice + 1 < last) b.fetch(matrix_b, Offset(slice + 1) * BK);
        multiply_slice<LOOPS>(sum, slices, half, BK / 2);
        if (slice + 1 < last) store(half ^ 1);
        __syncthreads();
    }
}
