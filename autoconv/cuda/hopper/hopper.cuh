// Hopper's asynchronous instructions (PTX ISA 8.0, sm_90a), in PTX and in C++ for the emulator of the tests:
// barriers in shared memory, the tensor copy engine, matrix products of a warpgroup.
#pragma once
#include "../common/common.cuh"

using Word = unsigned long long;

struct alignas(64) TensorMap {  // opaque: see tensor_map.py
    Word word[16];
};
struct alignas(8) Barrier {
    Word state;
};

constexpr int LINE_BYTES = 128;             // of shared memory: the width of the widest swizzle; there are halves of it
constexpr int ATOM_BYTES = 8 * LINE_BYTES;  // after which it repeats

#ifndef SIMT
#define GRID_CONSTANT __grid_constant__

// `count` arrivals and the bytes announced end a phase. The fence makes it known to the copy engine.
DEVICE void init_barrier(Barrier& barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
DEVICE void arrive_expecting(Barrier& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
DEVICE void await(Barrier& barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// The map is wanted soon.
DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// A box of the array to shared memory behind the thread's back; zeros where it lies outside.
DEVICE void fetch_box(void* to, const TensorMap& map, Barrier& barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}
// Pixels from (n, h, w) on, each moved by (dh, dw), from channel c on.
DEVICE void fetch_pixels(void* to, const TensorMap& map, Barrier& barrier, int c, int w, int h, int n, int dw, int dh) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
        ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(w), "r"(h), "r"(n),
          "h"(static_cast<short>(dw)), "h"(static_cast<short>(dh)) : "memory");
}

// Registers to a thread from here on, for the whole warpgroup.
template <int count>
DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count>
DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }

// Before the first product of a group: what the threads did to the sums is done.
DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
DEVICE void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Sums of finished products are not to be read before this.
template <int count>
DEVICE void settle(float (&sums)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// d (64 x N) += a (64 x 16, or 8 of tf32) b (.. x N), both in shared memory. A thread of the warpgroup holds in
// d[4i + 2h + e] row 16 (warp) + 8h + lane / 4, column 8i + lane % 4 * 2 + e. ACROSS: lines run across the depth.
#define AUTOCONV_TEXT_32                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define AUTOCONV_TEXT_64                                                                                         \
    AUTOCONV_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "   \
                     "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define AUTOCONV_TEXT_128                                                                                        \
    AUTOCONV_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "   \
                     "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, " \
                     "%99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
                     "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define AUTOCONV_D8(i)                                                                                        \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define AUTOCONV_D32(i) AUTOCONV_D8(i), AUTOCONV_D8(i + 8), AUTOCONV_D8(i + 16), AUTOCONV_D8(i + 24)
#define AUTOCONV_SUMS_32 AUTOCONV_D32(0)
#define AUTOCONV_SUMS_64 AUTOCONV_D32(0), AUTOCONV_D32(32)
#define AUTOCONV_SUMS_128 AUTOCONV_D32(0), AUTOCONV_D32(32), AUTOCONV_D32(64), AUTOCONV_D32(96)

#define AUTOCONV_WGMMA_16(type, suffix, count, n, at_a, at_b, at_ta, at_tb)                                         \
    template <bool A_ACROSS, bool B_ACROSS>                                                                         \
    DEVICE void multiply_async(type, float (&d)[count], Word a, Word b) {                                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." suffix "." suffix " {" AUTOCONV_TEXT_##count  \
                     "}, " at_a ", " at_b ", 1, 1, 1, " at_ta ", " at_tb ";"                                        \
                     : AUTOCONV_SUMS_##count                                                                        \
                     : "l"(a), "l"(b), "n"(int(A_ACROSS)), "n"(int(B_ACROSS)));                                     \
    }
#define AUTOCONV_WGMMA_TF32(count, n, at_a, at_b)                                                                   \
    template <bool A_ACROSS, bool B_ACROSS>                                                                         \
    DEVICE void multiply_async(float, float (&d)[count], Word a, Word b) {                                          \
        static_assert(!A_ACROSS && !B_ACROSS, "tf32 wants lines along the depth");                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32 {" AUTOCONV_TEXT_##count               \
                     "}, " at_a ", " at_b ", 1, 1, 1;"                                                              \
                     : AUTOCONV_SUMS_##count                                                                        \
                     : "l"(a), "l"(b));                                                                             \
    }
#define AUTOCONV_WGMMA(count, n, at_a, at_b, at_ta, at_tb)                         \
    AUTOCONV_WGMMA_16(half_t, "f16", count, n, at_a, at_b, at_ta, at_tb)           \
    AUTOCONV_WGMMA_16(bfloat16_t, "bf16", count, n, at_a, at_b, at_ta, at_tb)      \
    AUTOCONV_WGMMA_TF32(count, n, at_a, at_b)
AUTOCONV_WGMMA(32, "64", "%32", "%33", "%34", "%35")
AUTOCONV_WGMMA(64, "128", "%64", "%65", "%66", "%67")
AUTOCONV_WGMMA(128, "256", "%128", "%129", "%130", "%131")

// The same with a in registers, pairs of values: a thread of the warpgroup holds in a[2h + e] row
// 16 (warp) + 8e + lane / 4, depths 8h + lane % 4 * 2 and the next one. FRESH: d = a b, whatever it was.
#define AUTOCONV_WGMMA_HELD(count, n, at_a, at_b, at_old, at_tb)                                                    \
    template <bool B_ACROSS, bool FRESH>                                                                            \
    DEVICE void multiply_held(bfloat16_t, float (&d)[count], const unsigned (&a)[4], Word b) {                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" AUTOCONV_TEXT_##count              \
                     "}, {" at_a "}, " at_b ", " at_old ", 1, 1, " at_tb ";"                                        \
                     : AUTOCONV_SUMS_##count                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(!FRESH)), "n"(int(B_ACROSS)));   \
    }
AUTOCONV_WGMMA_HELD(32, "64", "%32, %33, %34, %35", "%36", "%37", "%38")
AUTOCONV_WGMMA_HELD(64, "128", "%64, %65, %66, %67", "%68", "%69", "%70")

#else  // the emulator
#define GRID_CONSTANT

DEVICE unsigned shared_address(const void* pointer) { return simt::shared_offset(pointer); }

DEVICE void init_barrier(Barrier& barrier, int count) { simt::init_phases(&barrier, count); }
DEVICE void fence_barriers() { simt::show_phases(); }
DEVICE void arrive(Barrier& barrier) { simt::arrive(&barrier, 0); }
DEVICE void arrive_expecting(Barrier& barrier, int bytes) { simt::arrive(&barrier, bytes); }
DEVICE void await(Barrier& barrier, int parity) { simt::await_phase(&barrier, parity); }

DEVICE void prefetch_map(const TensorMap&) {}
DEVICE void fetch_box(void* to, const TensorMap& map, Barrier& barrier, int x, int y, int z) {
    simt::fetch(to, &map, &barrier, {x, y, z, 0}, {0, 0}, false);
}
DEVICE void fetch_pixels(void* to, const TensorMap& map, Barrier& barrier, int c, int w, int h, int n, int dw, int dh) {
    simt::fetch(to, &map, &barrier, {c, w, h, n}, {dw, dh}, true);
}

template <int count>
DEVICE void fewer_registers() { static_assert(count % 8 == 0 && count >= 24, "in eights"); }
template <int count>
DEVICE void more_registers() { static_assert(count % 8 == 0 && count <= 256, "in eights"); }

DEVICE void fence_products() { simt::fence_products(); }
DEVICE void commit_products() { simt::commit_products(); }
template <int pending>
DEVICE void wait_products() {
    simt::wait_products(pending);
}
template <int count>
DEVICE void settle(float (&)[count]) {}

template <bool A_ACROSS, bool B_ACROSS, class T, int count>
DEVICE void multiply_async(T, float (&d)[count], Word a, Word b) {
    static_assert(sizeof(T) == 2 || !(A_ACROSS || B_ACROSS), "tf32 wants lines along the depth");
    simt::multiply_async({d, 2 * count, sizeof(T), a, b, A_ACROSS, B_ACROSS,
                          [](unsigned bits) UNWATCHED { return element(T{}, bits, 0); }});
}
template <bool B_ACROSS, bool FRESH, class T, int count>
DEVICE void multiply_held(T, float (&d)[count], const unsigned (&a)[4], Word b) {
    simt::multiply_async({d, 2 * count, sizeof(T), 0, b, false, B_ACROSS,
                          [](unsigned bits) UNWATCHED { return element(T{}, bits, 0); },
                          true, FRESH, {a[0], a[1], a[2], a[3]}});
}
#endif

// How the tensor cores find a tile in shared memory, swizzled by the width of its lines: 128 bytes, or 64. Where lines
// run along the depth, each is a row, and eight rows are an atom. Where they run across it, each is one depth of as
// many rows as a line holds, eight depths are an atom, and `block` bytes on begin the next rows.
template <int line = LINE_BYTES>
DEVICE Word matrix_at(const void* pointer, int block) {
    static_assert(line == LINE_BYTES || 2 * line == LINE_BYTES, "swizzles of two widths");
    const Word swizzled = Word(LINE_BYTES / line) << 62, atom = 8 * line >> 4;
    return (shared_address(pointer) & 0x3ffffu) >> 4 | Word(block >> 4) << 16 | atom << 32 | swizzled;
}
DEVICE constexpr Word further(int bytes) { return static_cast<Word>(bytes >> 4); }
