// Direct convolution of few channels on tensor cores: how filters are packed, and what a block is told.
//
// The depth of the product is made of quads: four channels of a tap, filled up with zeros. A matrix instruction takes four
// quads, one to each lane of four, whose two registers of a fragment are the quad. So of pixels a lane reads eight bytes,
// wherever the tap meets them, and nothing is copied for each tap.
//
// In NCHW rows of the product are filters and columns are pixels, in NHWC the other way round: columns are neighbours in
// memory. They are dealt to lanes such that each lane has RUN neighbours, which leave at once.
#pragma once
#include "../common/implicit.cuh"

constexpr int QUAD = 4, QUADS = ceil_div(static_cast<int>(C), QUAD);  // channels of one; and of a tap
constexpr int ENTRIES = static_cast<int>(R * S) * QUADS, STEPS = ceil_div(ENTRIES, 4);  // of the depth, in quads and fours
constexpr int GROUP = 8;                           // rows, or columns, of a fragment that lie together in a register
constexpr int PAIRS = BM / (2 * GROUP);            // of groups of filters
constexpr int RUN = 16 / sizeof(T), TOGETHER = RUN / 2;  // neighbours of a lane, and the groups that they come from
constexpr bool FILTER_ROWS = LAYOUT == NCHW;
static_assert(BM % (4 * RUN) == 0, "whole runs");

// A float32 is the sum of three bfloat16 numbers, and a product that of the six largest of theirs (see gemm/tensor.cu).
constexpr int PARTS = sizeof(T) == 4 ? 3 : 1;
using Part = Either<PARTS == 3, bfloat16_t, T>;

struct alignas(8) Quad {
    unsigned word[2];
};

// Values in parts, in pairs: the first in the lower half.
DEVICE void split(unsigned (&part)[PARTS], float low, float high) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const unsigned pair = part[p] = to_bfloat16_pair(low, high);
        low -= bits_float(pair << 16);
        high -= bits_float(pair & 0xffff0000u);
    }
}
template <class Narrow>
DEVICE void split(unsigned (&part)[PARTS], Narrow low, Narrow high) {
    part[0] = low.bits | static_cast<unsigned>(high.bits) << 16;
}
DEVICE void split(Quad (&part)[PARTS], const T (&value)[QUAD]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned pair[PARTS];
        split(pair, value[2 * i], value[2 * i + 1]);
#pragma unroll
        for (int p = 0; p < PARTS; p++) part[p].word[i] = pair[p];
    }
}

// Which of the columns is number `at` of a group: lane `at / 2` of four has neighbours from TOGETHER groups.
DEVICE constexpr int column_of(int group, int at) {
    return group / TOGETHER * 4 * RUN + at / 2 * RUN + group % TOGETHER * 2 + at % 2;
}
DEVICE constexpr int row_of(int group, int at) { return group * GROUP + at; }

// What a lane has of two groups of filters, in the order of the registers: as rows those of lower depth come first, as
// columns those of the first group.
using Fragment = Bits128;
DEVICE constexpr int word_of(int group, int higher) { return FILTER_ROWS ? 2 * higher + group : 2 * group + higher; }
constexpr int FRAGMENTS = PARTS * STEPS * PAIRS * 32;  // of a block of filters
DEVICE int fragment_at(int part, int step, int pair, int lane) { return ((part * STEPS + step) * PAIRS + pair) * 32 + lane; }
