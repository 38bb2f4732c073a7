// float32 as the sum of three bfloat16 numbers, and in which order `split` wants those of filters: to each tap, group and
// BK of the depth, the parts of all columns in lines of BK.
#pragma once
#include "../common/common.cuh"

constexpr int PARTS = 3;
constexpr int STEP = 16;  // depth of one matrix instruction

// The depth may have any order that both operands share. That of a step is such that the four numbers which a lane
// reads at once, neighbours in memory, are its two pairs of a fragment.
DEVICE int depth_at(int place) { return place % 8 / 2 * 4 + place / 8 * 2 + place % 2; }
DEVICE int place_of(int depth) { return depth / 2 % 2 * 8 + depth / 4 * 2 + depth % 2; }

// Neighbouring numbers of one part, which travel at once.
template <int LENGTH>
struct alignas(LENGTH * sizeof(bfloat16_t)) Some {
    bfloat16_t value[LENGTH];
};

// So many numbers to each part, one array of parts behind the other.
template <int LENGTH>
DEVICE void put_parts(bfloat16_t* to, Offset distance, float (&values)[LENGTH]) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        Some<LENGTH> some;
#pragma unroll
        for (int i = 0; i < LENGTH; i++) {
            some.value[i] = to_bfloat16(values[i]);
            values[i] -= to_float(some.value[i]);
        }
        aligned<Some<LENGTH>>(to + p * distance) = some;
    }
}
