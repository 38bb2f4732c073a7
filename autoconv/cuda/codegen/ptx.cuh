// Every instruction that C++ has no word for, once in PTX and once in C++ for the emulator of the tests.
// Nothing here needs a CUDA header, so NVRTC alone compiles the kernels.
#pragma once

struct half_t {
    unsigned short bits;
};
struct bfloat16_t {
    unsigned short bits;
};
struct alignas(16) Bits128 {
    unsigned word[4];
};

#ifndef SIMT
#define SHARED(type, name) __shared__ type name
// More than a kernel may declare: the launch says how much.
#define SHARED_DYNAMIC(type, name)                      \
    extern __shared__ __align__(1024) char dynamic_[]; \
    type& name = *reinterpret_cast<type*>(dynamic_)
#define DEVICE __device__ __forceinline__
#define CONSTANT static __constant__ const  // a table that the threads of a warp read at the same place

DEVICE unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

DEVICE float bits_float(unsigned bits) { return __uint_as_float(bits); }
DEVICE unsigned float_bits(float value) { return __float_as_uint(value); }

DEVICE float to_float(half_t value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}
DEVICE half_t to_half(float value) {
    half_t narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}

// The same value, which the compiler takes for a new one: what follows from it is computed here and now.
DEVICE int launder(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The same pointer to global memory, found here for all who ask for it, and not anew with what each of them adds.
template <class Value>
DEVICE const Value* settled(const Value* pointer) {
    asm("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// An entry of a constant table; of two words as one wide load, before it is known which parts of it are needed.
template <class Entry>
DEVICE Entry read_constant(const Entry& entry) {
    if constexpr (sizeof(Entry) != 8) {
        return entry;
    } else {
        union {
            unsigned word[2];
            Entry entry;
        } read;
        asm("ld.const.v2.u32 {%0, %1}, [%2];"
            : "=r"(read.word[0]), "=r"(read.word[1])
            : "l"(__cvta_generic_to_constant(&entry)));
        return read.entry;
    }
}

// What lies at an address that is a multiple of the type's alignment: one wide load.
template <class Value>
DEVICE const Value& aligned(const void* pointer) {
    return *static_cast<const Value*>(pointer);
}
template <class Value>
DEVICE Value& aligned(void* pointer) {
    return *static_cast<Value*>(pointer);
}

// A texture object: the bits of element (x, y) of an array, zeros beyond its borders. Coordinates up to 2**23 are
// exact.
using Texture = unsigned long long;
DEVICE uint2 texel_bits(Texture texture, int x, int y) {
    unsigned word[4];
    asm("tex.2d.v4.u32.f32 {%0, %1, %2, %3}, [%4, {%5, %6}];"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
        : "l"(texture), "f"(static_cast<float>(x) + 0.5f), "f"(static_cast<float>(y) + 0.5f));
    return {word[0], word[1]};
}
DEVICE double bits_double(uint2 bits) { return __hiloint2double(static_cast<int>(bits.y), static_cast<int>(bits.x)); }

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE double shuffle_xor(double value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// A barrier of the warp alone.
DEVICE void sync_warp() { __syncwarp(); }

constexpr bool ASYNC_COPIES = __CUDA_ARCH__ >= 800;
#if __CUDA_ARCH__ >= 800
// Sixteen bytes, or four, to shared memory behind the thread's back; zeros, and `from` not read, unless `wanted`. With
// four `from` may then be any address: the source is ignored altogether (PTX ISA, "cp.async": `ignore-src`).
DEVICE void copy_async16(void* to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
template <int further = 0>  // by so many floats beyond `to`
DEVICE void copy_async4(void* to, const void* from, bool wanted) {
    asm volatile("{.reg .pred no; setp.eq.s32 no, %2, 0; cp.async.ca.shared.global [%0 + %3], [%1], 4, no;}"
                 ::"r"(shared_address(to)), "l"(from), "r"(static_cast<int>(wanted)), "n"(4 * further) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(unsigned (&d)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrices_transposed(unsigned (&d)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}

// c (16x8) += a (16x16) b (16x8) of 16-bit values, or a (16x8) b (8x8) of tf32, in fragments.
#define AUTOCONV_MMA(type, shape, suffix)                                                                            \
    DEVICE void multiply(type, float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {                      \
        asm("mma.sync.aligned." shape ".row.col.f32." suffix ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "   \
            "{%0, %1, %2, %3};"                                                                                      \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                         \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                     \
    }
AUTOCONV_MMA(half_t, "m16n8k16", "f16.f16")
AUTOCONV_MMA(bfloat16_t, "m16n8k16", "bf16.bf16")
AUTOCONV_MMA(float, "m16n8k8", "tf32.tf32")
#undef AUTOCONV_MMA

DEVICE unsigned round_tf32(unsigned bits) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}
#else  // no such copies: the thread waits for its own
DEVICE void copy_async16(void* to, const void* from, bool wanted) {
    aligned<Bits128>(to) = wanted ? aligned<Bits128>(from) : Bits128{};
}
template <int further = 0>
DEVICE void copy_async4(void* to, const void* from, bool wanted) {
    aligned<unsigned>(static_cast<unsigned*>(to) + further) = wanted ? aligned<unsigned>(from) : 0u;
}
DEVICE void commit_copies() {}
template <int pending>
DEVICE void wait_copies() {}
#endif  // __CUDA_ARCH__ >= 800

#else  // the emulator
#define DEVICE inline
#define CONSTANT static const

DEVICE float bits_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE unsigned float_bits(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

DEVICE float to_float(half_t value) {
    const unsigned sign = (value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x400u) return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f));
    return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}
DEVICE half_t to_half(float value) {
    const unsigned bits = float_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const auto give = [&](unsigned low) { return half_t{static_cast<unsigned short>(sign | low)}; };
    if (magnitude > 0x7f800000u) return give(0x7fffu);
    if (magnitude >= 0x477ff000u) return give(0x7c00u);
    if (magnitude < 0x38800000u)  // a subnormal half: the addition rounds to its last place
        return give(float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u);
    return give((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

DEVICE int launder(int value) { return value; }
template <class Value>
DEVICE const Value* settled(const Value* pointer) {
    return pointer;
}
template <class Entry>
DEVICE Entry read_constant(const Entry& entry) {
    return entry;
}

template <class Value>
DEVICE const Value& aligned(const void* pointer) {
    simt::check_aligned(pointer, alignof(Value), "wide load");
    return *static_cast<const Value*>(pointer);
}
template <class Value>
DEVICE Value& aligned(void* pointer) {
    simt::check_aligned(pointer, alignof(Value), "wide store");
    return *static_cast<Value*>(pointer);
}

struct uint2 {
    unsigned x, y;
};
struct alignas(64) Texture {  // as emulator.py packs one
    unsigned long long word[16];
};
DEVICE uint2 texel_bits(const Texture& texture, int x, int y) {
    uint2 bits = {};
    simt::texel(&bits, &texture, x, y);
    return bits;
}
DEVICE double bits_double(uint2 bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

template <class Value>
DEVICE Value shuffle_xor(Value value, int mask) {
    struct Operand {
        Value in, out;
        int mask;
    } operand{value, value, mask};
    simt::collective(__LINE__, &operand, [](void** lanes) UNWATCHED {
        const auto of = [&](int lane) UNWATCHED -> Operand& { return *static_cast<Operand*>(lanes[lane]); };
        for (int lane = 0; lane < simt::warp_size; lane++) of(lane).out = of(lane ^ of(lane).mask).in;
    });
    return operand.out;
}

DEVICE void sync_warp() { simt::warp_barrier(__LINE__); }

constexpr bool ASYNC_COPIES = true;
DEVICE void copy_async16(void* to, const void* from, bool wanted) { simt::copy_async(to, from, 16, wanted); }
template <int further = 0>
DEVICE void copy_async4(void* to, const void* from, bool wanted) {
    simt::copy_async(static_cast<unsigned*>(to) + further, from, 4, wanted);
}
DEVICE void commit_copies() { simt::commit_copies(); }
template <int pending>
DEVICE void wait_copies() {
    simt::wait_copies(pending);
}

template <bool transposed>
DEVICE void load_matrices_of(unsigned (&d)[4], const void* row) {
    struct Operand {
        const void* at;
        unsigned short row[8];
        unsigned* d;
    } operand;
    operand.at = row;
    const Bits128 bits = aligned<Bits128>(row);  // each lane reads the row whose address it gives
    memcpy(operand.row, &bits, 16);
    operand.d = d;
    simt::collective(__LINE__, &operand, [](void** lanes) UNWATCHED {
        const auto at = [&](int matrix, int i, int j) UNWATCHED -> unsigned {
            return static_cast<Operand*>(lanes[8 * matrix + i])->row[j];
        };
        for (int matrix = 0; matrix < 4; matrix++) {
            unsigned banks = 0;
            for (int i = 0; i < 8; i++)
                banks |= 1u << reinterpret_cast<uintptr_t>(static_cast<Operand*>(lanes[8 * matrix + i])->at) / 16 % 8;
            if (banks != 0xffu) simt::note("ldmatrix: rows of a matrix in the same banks");
        }
        for (int lane = 0; lane < simt::warp_size; lane++)
            for (int matrix = 0; matrix < 4; matrix++) {
                const int i = lane / 4, j = lane % 4 * 2;
                static_cast<Operand*>(lanes[lane])->d[matrix] =
                    transposed ? at(matrix, j, i) | at(matrix, j + 1, i) << 16
                               : at(matrix, i, j) | at(matrix, i, j + 1) << 16;
            }
    });
}
DEVICE void load_matrices(unsigned (&d)[4], const void* row) { load_matrices_of<false>(d, row); }
DEVICE void load_matrices_transposed(unsigned (&d)[4], const void* row) { load_matrices_of<true>(d, row); }

// The value at position `i` of a 32-bit register that holds one tf32 or two 16-bit values.
UNWATCHED inline float element(half_t, unsigned bits, int i) {
    return to_float(half_t{static_cast<unsigned short>(bits >> 16 * i)});
}
UNWATCHED inline float element(bfloat16_t, unsigned bits, int i) { return bits_float(bits >> 16 * i << 16); }
UNWATCHED inline float element(float, unsigned bits, int) { return bits_float(bits & 0xffffe000u); }

// What a tensor core makes of a sum: all terms are cut to the last place of the largest, and so is the sum, always
// towards zero (Fasi, Higham, Mikaitis & Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021): at worst so, as
// newer ones keep a bit or two more.
UNWATCHED inline float truncated_sum(const double* terms, int count) {
    double largest = 0, plain = 0;
    for (int i = 0; i < count; i++) {
        largest = std::max(largest, terms[i] < 0 ? -terms[i] : terms[i]);
        plain += terms[i];
    }
    if (!(plain - plain == 0) || largest == 0) return static_cast<float>(plain);
    unsigned long long bits;
    memcpy(&bits, &largest, 8);
    const int exponent = std::max(static_cast<int>(bits >> 52) - 1023, -126);
    const double up = std::ldexp(1.0, 23 - exponent), down = std::ldexp(1.0, exponent - 23);
    long long sum = 0;  // in units of the last place of the largest
    for (int i = 0; i < count; i++) sum += static_cast<long long>(terms[i] * up);
    unsigned long long size = sum < 0 ? -sum : sum;
    int extra = 0;  // bits beyond a float's
    while (size >> extra >> 24) extra++;
    return static_cast<float>((sum < 0 ? -1.0 : 1.0) * static_cast<double>(size >> extra << extra) * down);
}

template <class T>
DEVICE void multiply(T, float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct Operand {
        float* c;
        const unsigned *a, *b;
    } operand{c, a, b};
    simt::collective(__LINE__, &operand, [](void** lanes) UNWATCHED {
        constexpr int packed = 4 / sizeof(T), depth = 8 * packed;  // values to a register, to a row of a
        float rows[16][depth], columns[8][depth];
        const auto of = [&](int lane) UNWATCHED -> Operand& { return *static_cast<Operand*>(lanes[lane]); };
        for (int lane = 0; lane < simt::warp_size; lane++)
            for (int i = 0; i < packed; i++) {
                const int row = lane / 4, k = lane % 4 * packed + i;
                for (int r = 0; r < 4; r++)
                    rows[row + r % 2 * 8][k + r / 2 * 4 * packed] = element(T{}, of(lane).a[r], i);
                for (int r = 0; r < 2; r++) columns[row][k + r * 4 * packed] = element(T{}, of(lane).b[r], i);
            }
        for (int lane = 0; lane < simt::warp_size; lane++)
            for (int i = 0; i < 4; i++) {
                double terms[depth + 1];
                for (int k = 0; k < depth; k++)
                    terms[k] = double(rows[lane / 4 + i / 2 * 8][k]) * columns[lane % 4 * 2 + i % 2][k];
                terms[depth] = of(lane).c[i];
                of(lane).c[i] = truncated_sum(terms, depth + 1);
            }
    });
}
DEVICE unsigned round_tf32(unsigned bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : (bits + 0x1000u) & 0xffffe000u;
}
#endif

DEVICE float to_float(float value) { return value; }
DEVICE double to_float(double value) { return value; }
DEVICE float to_float(bfloat16_t value) { return bits_float(static_cast<unsigned>(value.bits) << 16); }

// To nearest even; and two numbers, the first in the lower half.
#if defined(SIMT) || __CUDA_ARCH__ < 800
DEVICE bfloat16_t to_bfloat16(float value) {
    const unsigned bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fffu};
    return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
DEVICE unsigned to_bfloat16_pair(float low, float high) {
    return to_bfloat16(low).bits | static_cast<unsigned>(to_bfloat16(high).bits) << 16;
}
#else
DEVICE bfloat16_t to_bfloat16(float value) {
    bfloat16_t narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}
DEVICE unsigned to_bfloat16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

template <class T>
struct Texel;  // Texel<T>::of(bits): an element as a texture gives it
template <>
struct Texel<float> {
    DEVICE static float of(uint2 bits) { return bits_float(bits.x); }
};
template <>
struct Texel<double> {
    DEVICE static double of(uint2 bits) { return bits_double(bits); }
};
template <>
struct Texel<half_t> {
    DEVICE static half_t of(uint2 bits) { return {static_cast<unsigned short>(bits.x)}; }
};
template <>
struct Texel<bfloat16_t> {
    DEVICE static bfloat16_t of(uint2 bits) { return {static_cast<unsigned short>(bits.x)}; }
};
