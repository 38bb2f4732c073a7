// A tile of a matrix product in scalar arithmetic: BM x BN of it to a block, BK deep at a time.
// A warp computes 4 TM x 8 TN of the tile, its lanes being 4 x 8, in pieces of 4 x 4 whose rows and
// columns are read from shared memory as 128-bit words: broadcast along the other axis, no bank conflicts.
// The next slice travels through registers to the other half of shared memory: one barrier to a slice.
#pragma once
#include "common.cuh"

constexpr int WARP_M = 4 * TM, WARP_N = 8 * TN;
static_assert(BM % WARP_M == 0 && BN % WARP_N == 0 && PRODUCT_THREADS == BM / WARP_M * (BN / WARP_N) * 32, "whole warps");
static_assert(TM % 4 == 0 && TN % 4 == 0, "pieces of 4 x 4");

struct Half {
    alignas(16) Acc a[BK][BM + 4];  // the 4 spread columns of one row over the banks
    alignas(16) Acc b[BK][BN + 4];
};
struct Slices {
    Half half[2];
};

// One operand's slice: EXTENT x BK, in runs of RUN neighbours along k or across it. The operand says what lies
// `across` the depth, what lies `along` it, so far into the slice that begins there, and where the two `meet` in memory.
template <int EXTENT, bool ALONG_K, int RUN, class Operand>
struct Slice {
    static constexpr int TOTAL = EXTENT * BK / RUN, COUNT = ceil_div(TOTAL, PRODUCT_THREADS);
    static constexpr int EACH = (ALONG_K ? BK : EXTENT) / RUN;  // runs that lie one after the other
    static constexpr bool REGULAR = PRODUCT_THREADS % EACH == 0;
    // How many lines a thread meets, and whether what it knows of them is kept from slice to slice: so much of it
    // as would take more registers is found again.
    using Line = decltype(Operand{}.across(0));
    static constexpr int LINES = !ALONG_K && REGULAR ? 1 : COUNT;
    static constexpr bool KEPT = LINES * sizeof(Line) <= 4 * sizeof(Offset);
    Operand operand;
    Offset start;
    int first;  // where the thread's first value goes
    Line kept[LINES];
    Acc value[COUNT][RUN];

    DEVICE Slice(Operand of, Offset from) : operand(of), start(from), first(launder(place(threadIdx.x, 0))) {
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
            Position run = operand.meet(line, operand.along(depth, along(thread, i)));
            run.exists = run.exists && exists(thread, i);
            load_run(value[i], settled(from + run.begin), {0, run.at, run.exists});
        }
    }

    // Where a run goes in shared memory.
    DEVICE static int place(unsigned thread, int i) { return along(thread, i) * (EXTENT + 4) + across(thread, i); }

    DEVICE void store(Acc (&rows)[BK][EXTENT + 4]) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            Acc* to = &rows[0][0] + (REGULAR ? first + place(i * PRODUCT_THREADS, 0) : place(threadIdx.x, i));
#pragma unroll
            for (int j = 0; j < RUN; j++)
                if (exists(threadIdx.x, i)) to[j * (ALONG_K ? EXTENT + 4 : 1)] = value[i][j];
        }
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
struct Pieces {
    int row, column;  // of the first one
};

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
DEVICE void multiply_slice(Acc (&sum)[TM][TN], const Half& half, int first, Pieces pieces) {
#pragma unroll AHEAD<LOOPS>
    for (int k = first; k < first + BK / 2; k++) {
        Acc a[TM], b[TN];
#pragma unroll
        for (int i = 0; i < TM; i += 4) read4(&a[i], &half.a[k][pieces.row + i / 4 * 16]);
#pragma unroll
        for (int j = 0; j < TN; j += 4) read4(&b[j], &half.b[k][pieces.column + j / 4 * 32]);
#pragma unroll
        for (int i = 0; i < TM; i++)
#pragma unroll
            for (int j = 0; j < TN; j++) sum[i][j] += a[i] * b[j];
    }
}

// sum += A B over slices first ... last - 1, of which there is one at least, from this row and this column on; operands
// as `Slice` wants them. `LOOPS` is false where there is only one slice, and the compiler knows. Other threads may still
// read slices when this one is done.
template <bool A_ALONG_K, int A_RUN, bool B_ALONG_K, int B_RUN, bool LOOPS = true, class ElementA, class ElementB,
          class A, class B>
DEVICE void multiply_tile(Acc (&sum)[TM][TN], Slices& slices, int first, int last, const ElementA* matrix_a,
                          const ElementB* matrix_b, A operand_a, Offset row, B operand_b, Offset column) {
    Slice<BM, A_ALONG_K, A_RUN, A> a(operand_a, row);
    Slice<BN, B_ALONG_K, B_RUN, B> b(operand_b, column);
    const Pieces pieces = {launder(row_of(0)), launder(column_of(0))};
    a.fetch(matrix_a, Offset(first) * BK);
    a.store(slices.half[0].a);
    b.fetch(matrix_b, Offset(first) * BK);
    b.store(slices.half[0].b);
    __syncthreads();
    int now = 0;
    for (int slice = first + 1; slice < last; slice++) {  // one operand of the next slice at a time is on its way
        a.fetch(matrix_a, Offset(slice) * BK);
        multiply_slice<LOOPS>(sum, slices.half[now], 0, pieces);
        a.store(slices.half[now ^ 1].a);
        b.fetch(matrix_b, Offset(slice) * BK);
        multiply_slice<LOOPS>(sum, slices.half[now], BK / 2, pieces);
        b.store(slices.half[now ^ 1].b);
        now ^= 1;
        __syncthreads();
    }
#pragma unroll 1
    for (int k = 0; k < BK; k += BK / 2) multiply_slice<LOOPS>(sum, slices.half[now], k, pieces);
}
