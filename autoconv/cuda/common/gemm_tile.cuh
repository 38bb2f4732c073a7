// A tile of a matrix product in scalar arithmetic: BM x BN of it to a block, BK deep at a time.
// A warp computes 4 TM x 8 TN of the tile, its lanes being 4 x 8, in pieces of 4 x 4 whose rows and
// columns are read from shared memory as 128-bit words: broadcast along the other axis, no bank conflicts.
// The next slice travels to the other half of shared memory, through registers or, if it comes by single floats, past
// them: one barrier to a slice.
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
template <int EXTENT, bool ALONG_K, int RUN, class Element, class Operand>
struct Slice {
    static constexpr bool COPIED = ASYNC_COPIES && RUN == 1 && sizeof(Element) == 4;  // past the registers
    static constexpr int TOTAL = EXTENT * BK / RUN, COUNT = ceil_div(TOTAL, PRODUCT_THREADS);
    static constexpr int EACH = (ALONG_K ? BK : EXTENT) / RUN;  // runs that lie one after the other
    static constexpr bool REGULAR = PRODUCT_THREADS % EACH == 0;
    // How many lines a thread meets, and whether what it knows of them is kept from slice to slice: so much of it
    // as would take more registers is found again.
    using Line = decltype(Operand{}.across(0));
    static constexpr int LINES = !ALONG_K && REGULAR ? 1 : COUNT;
    static constexpr bool KEPT = LINES * sizeof(Line) <= 4 * sizeof(Offset);
    Operand operand;
    const Element* matrix;
    Offset start;
    Line kept[LINES];
    Acc value[COUNT][RUN];

    DEVICE Slice(Operand of, const Element* in, Offset from) : operand(of), matrix(in), start(from) {
#pragma unroll
        for (int i = 0; i < LINES; i++) kept[i] = operand.across(start + across(threadIdx.x, i));
    }

    // Which of those runs, and which such row of them; the compiler does not find by itself that they are regular.
    DEVICE static constexpr int inner(unsigned thread, int i) {
        return static_cast<int>((REGULAR ? thread : thread + i * PRODUCT_THREADS) % EACH * RUN);
    }
    DEVICE static constexpr int outer(unsigned thread, int i) {
        if constexpr (REGULAR) return static_cast<int>(thread / EACH) + i * (PRODUCT_THREADS / EACH);
        return static_cast<int>((thread + i * PRODUCT_THREADS) / EACH);
    }
    // The run's first position: across k, and along it.
    DEVICE static constexpr int across(unsigned thread, int i) { return ALONG_K ? outer(thread, i) : inner(thread, i); }
    DEVICE static constexpr int along(unsigned thread, int i) { return ALONG_K ? inner(thread, i) : outer(thread, i); }
    DEVICE static bool exists(int thread, int i) {
        return TOTAL % PRODUCT_THREADS == 0 || thread + i * PRODUCT_THREADS < TOTAL;
    }

    // Start on the slice's way: `begin` is where the thread's part of it goes.
    DEVICE void fetch(Offset depth, Acc* begin) {
        const int thread = KEPT ? threadIdx.x : launder(threadIdx.x), first = along(thread, 0);
        fetch_run<0>(thread, depth, ALONG_K ? first : launder(first), begin);
    }
    template <int i>
    DEVICE void fetch_run(int thread, Offset depth, int first, Acc* begin) {
        const Line line = KEPT ? kept[LINES == 1 ? 0 : i] : operand.across(start + across(thread, i));
        const Ahead ahead = REGULAR ? Ahead(first, along(0, i)) : Ahead(along(thread, i));
        const Position run = operand.meet(line, operand.along(depth, ahead));
        const Element* from = settled(matrix + run.begin);
        if constexpr (!COPIED)
            load_run(value[i], from, {0, run.at, run.exists && exists(thread, i)});
        else if (exists(thread, i))
            copy_async4<further(i)>(begin + apart(i), from + run.at, run.exists);
        if constexpr (i + 1 < COUNT) fetch_run<i + 1>(thread, depth, first, begin);
    }

    DEVICE void store(Acc* begin) const {
#pragma unroll
        for (int i = 0; i < (COPIED ? 0 : COUNT); i++)
#pragma unroll
            for (int j = 0; j < RUN; j++)
                if (exists(threadIdx.x, i)) begin[apart(i) + further(i) + j * (ALONG_K ? EXTENT + 4 : 1)] = value[i][j];
    }

    // Where a run goes in shared memory: from where the thread's first does if the others follow regularly, so much
    // further by a constant, so much by what each thread has to find.
    DEVICE static constexpr int place(unsigned thread, int i) {
        return along(thread, i) * (EXTENT + 4) + across(thread, i);
    }
    DEVICE static int begin() { return REGULAR ? place(threadIdx.x, 0) : 0; }
    DEVICE static constexpr int further(int i) { return REGULAR ? place(i * PRODUCT_THREADS, 0) : 0; }
    DEVICE static int apart(int i) { return REGULAR ? 0 : place(threadIdx.x, i); }
};

// All that this thread has begun to copy is there.
template <bool COPIED>
DEVICE void finish_copies() {
    if constexpr (COPIED) {
        commit_copies();
        wait_copies<0>();
    }
}

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
    const Acc *row, *column;  // of the first one, where the half that is read has them
};

// Over half of a slice: of more, too much would be read ahead for the registers. Blackwell's compiler wants less, and so
// does each where a single slice leaves no loop around it, where values of 16 bits wait in registers to be widened, and
// where the pixels of a strided wgrad take many to be found.
#if __CUDA_ARCH__ >= 1000
template <bool LOOPS>
constexpr int AHEAD = 2;
#else
template <bool LOOPS>
constexpr int AHEAD = !LOOPS || sizeof(T) == 2 ? 2 : DIRECTION == WGRAD && STRIDE_W > 1 ? BK / 4 : BK / 2;
#endif
template <bool LOOPS>
DEVICE void multiply_slice(Acc (&sum)[TM][TN], Pieces pieces, int first) {
#pragma unroll AHEAD<LOOPS>
    for (int k = first; k < first + BK / 2; k++) {
        Acc a[TM], b[TN];
#pragma unroll
        for (int i = 0; i < TM; i += 4) read4(&a[i], pieces.row + k * (BM + 4) + i / 4 * 16);
#pragma unroll
        for (int j = 0; j < TN; j += 4) read4(&b[j], pieces.column + k * (BN + 4) + j / 4 * 32);
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
    using SliceA = Slice<BM, A_ALONG_K, A_RUN, ElementA, A>;
    using SliceB = Slice<BN, B_ALONG_K, B_RUN, ElementB, B>;
    SliceA a(operand_a, matrix_a, row);
    SliceB b(operand_b, matrix_b, column);
    // Where the thread reads and writes in shared memory, in bytes: all that changes from slice to slice is the half.
    constexpr int B_AT = sizeof(Half::a), OTHER = sizeof(Half);
    const int row_at = launder(row_of(0) * sizeof(Acc)), column_at = launder(B_AT + column_of(0) * sizeof(Acc));
    const int a_at = launder(a.begin() * sizeof(Acc)), b_at = launder(B_AT + b.begin() * sizeof(Acc));
    const auto in = [&](int place) -> Acc* {
        return reinterpret_cast<Acc*>(reinterpret_cast<char*>(&slices) + place);
    };
    a.fetch(Offset(first) * BK, in(a_at));
    a.store(in(a_at));
    b.fetch(Offset(first) * BK, in(b_at));
    b.store(in(b_at));
    finish_copies<SliceA::COPIED || SliceB::COPIED>();
    __syncthreads();
    int now = 0;
    for (int slice = first + 1; slice < last; slice++) {  // one operand of the next slice at a time is on its way
        const int next = OTHER - now;
        a.fetch(Offset(slice) * BK, in(a_at + next));
        multiply_slice<LOOPS>(sum, {in(row_at + now), in(column_at + now)}, 0);
        a.store(in(a_at + next));
        b.fetch(Offset(slice) * BK, in(b_at + next));
        multiply_slice<LOOPS>(sum, {in(row_at + now), in(column_at + now)}, BK / 2);
        b.store(in(b_at + next));
        now = next;
        finish_copies<SliceA::COPIED || SliceB::COPIED>();
        __syncthreads();
    }
#pragma unroll 1
    for (int k = 0; k < BK; k += BK / 2) multiply_slice<LOOPS>(sum, {in(row_at + now), in(column_at + now)}, k);
}
