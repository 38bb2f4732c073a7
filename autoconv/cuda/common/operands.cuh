// The operands of an implicit GEMM, in slices of BK along the depth: where a line of pixels, or of the flat operand, and
// a depth meet in memory.
#pragma once
#include "implicit.cuh"

constexpr bool EVEN = DEPTH % BK == 0;  // no slice has less than another

// Pixels lie where a place and a tap of a channel meet: one of the two across the depth, the other along it.
struct Part {
    Offset at, h, v;  // where its row and column begin, and which they are
};

// A place at the tap of row and column 0; and a channel's tap, as so much further.
DEVICE Part spot(int group, Offset index) {
    const Place at = GRADIENT ? place(index, H, W) : place(index, P, Q);
    const Offset start = at.n * (HEIGHT * WIDTH * CHANNELS) + group * TAP_CHANNELS * CHANNEL;
    if constexpr (GRADIENT) return {start, at.i + PAD_TOP, at.j + PAD_LEFT};
    return {start, at.i * STRIDE_H - PAD_TOP, at.j * STRIDE_W - PAD_LEFT};
}
DEVICE Part reach(Offset index) {
    const Tap at = tap_of(index);
    constexpr Offset TOWARDS = GRADIENT ? -1 : 1;
    return {at.channel * CHANNEL, TOWARDS * (at.tap / S) * DILATION_H, TOWARDS * (at.tap % S) * DILATION_W};
}

// The row or column of the array, of which the stride leaves some out for dgrad: a negative number for those.
DEVICE Offset unstrided(Offset value, Offset stride) {
    if constexpr (!GRADIENT) return value;
    return value % stride == 0 ? value / stride : -1;
}

// Pixels whose row and column are checked at each place and tap.
struct CheckedPixels {
    int group;
    static constexpr Part NONE = {0, OUTSIDE, OUTSIDE};

    DEVICE Part across(Offset i) const {
        const Part part = DIRECTION == WGRAD ? reach(i) : spot(group, i);
        return i < PIXEL_LINES ? part : NONE;
    }
    DEVICE Part along(Offset slice, int ahead) const {
        const Offset depth = slice + ahead;
        const Part part = DIRECTION == WGRAD ? spot(group, depth) : reach(depth);
        return EVEN || depth < DEPTH ? part : NONE;
    }
    DEVICE static Position meet(Part across, Part along) {
        const Offset h = unstrided(across.h + along.h, STRIDE_H), v = unstrided(across.v + along.v, STRIDE_W);
        return {across.at + along.at, (h * WIDTH + v) * PIXEL, within(h, HEIGHT) && within(v, WIDTH)};
    }
};

// Pixels of which is known at a place where its tap 0 would lie, and which rows and columns of taps fall outside; of a
// tap, how far it is from tap 0.
constexpr unsigned NOWHERE = 1u << 31;
struct Spot {
    Offset at;
    unsigned outside;  // a bit to each row of taps, then one to each column; and always NOWHERE
};
struct alignas(8) Reach {
    Offset at;
    unsigned bits;  // of its row and its column, or NOWHERE
};
struct ChannelReach {
    Offset channel;
    Reach reach;
};

// The taps of one channel; where those of channels follow each other, also as many of the next ones as a slice that
// begins with the last tap comes by.
struct Reaches {
    static constexpr int COUNT = TAPS + (LAYOUT == NHWC || TAPS == 1 ? 0 : BK - 1);
    Reach of[COUNT];
    DEVICE constexpr Reaches() : of() {
        for (int i = 0; i < COUNT; i++) {
            const Offset r = i % TAPS / S, s = i % TAPS % S, h = r * DILATION_H, v = s * DILATION_W;
            const Offset at = GRADIENT ? -(h / STRIDE_H * WIDTH + v / STRIDE_W) : h * WIDTH + v;
            of[i] = {at * PIXEL + i / TAPS * CHANNEL, 1u << r % 32 | 1u << (R + s) % 32};
        }
    }
};

CONSTANT Reaches REACHES;

// Of the taps of one row or column, those that do not meet the array: a bit to each.
DEVICE unsigned missed(Offset start, int taps, Offset dilation, Offset stride, Offset extent) {
    const auto lowest = [](Offset count) { return (1u << count) - 1; };  // bits
    const auto least = [](Offset a, Offset b) { return a < b ? a : b; };
    if (!GRADIENT && dilation == 1) {  // those that do meet it follow each other
        const Offset before = -least(start, 0), until = least(extent - start, taps);
        return lowest(taps) & ~(lowest(-least(-until, 0)) & ~lowest(least(before, taps)));
    }
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < taps; i++)
        bits |= (within(unstrided(start + (GRADIENT ? -i : i) * dilation, stride), extent) ? 0u : 1u) << i % 32;
    return bits;
}
DEVICE Spot found_spot(int group, Offset index) {
    const Part part = spot(group, index);
    const Offset h = GRADIENT ? part.h / STRIDE_H : part.h, v = GRADIENT ? part.v / STRIDE_W : part.v;
    const unsigned rows = missed(part.h, R, DILATION_H, STRIDE_H, HEIGHT);
    const unsigned columns = missed(part.v, S, DILATION_W, STRIDE_W, WIDTH);
    return {part.at + (h * WIDTH + v) * PIXEL, rows | columns << R % 32 | NOWHERE};
}
constexpr Spot NO_SPOT = {0, ~0u};

// Places across the depth, and taps along it by a table.
struct TabledPixels {
    int group;

    DEVICE Spot across(Offset i) const { return i < PIXEL_LINES ? found_spot(group, i) : NO_SPOT; }
    DEVICE ChannelReach along(Offset slice, Ahead ahead) const {
        // a slice has a single tap where channels are neighbours and fill whole slices
        constexpr bool SINGLE = LAYOUT == NHWC && TAP_CHANNELS % BK == 0, FOLLOW = LAYOUT != NHWC && TAPS > 1;
        const Tap at = tap_of(SINGLE || FOLLOW ? slice : slice + ahead);
        const bool exists = EVEN || slice + ahead < DEPTH;
        const Reach* first = REACHES.of + (TAPS > 1 && (FOLLOW || exists) ? at.tap : 0) + (FOLLOW ? ahead.first : 0);
        const Reach found = read_constant(first[FOLLOW ? ahead.further : 0]);
        return {at.channel, {found.at + (SINGLE ? int(ahead) : 0), exists ? found.bits : NOWHERE}};
    }
    DEVICE static Position meet(Spot across, ChannelReach along) {
        return {across.at + (long long)along.channel * CHANNEL, along.reach.at, (across.outside & along.reach.bits) == 0};
    }
};

// Taps across the depth, and places along it.
struct SpottedPixels {
    int group;

    DEVICE Reach across(Offset i) const {
        const Part part = reach(i);
        const Offset r = part.h / DILATION_H, s = part.v / DILATION_W;
        return {part.at + (part.h * WIDTH + part.v) * PIXEL,
                i < PIXEL_LINES ? 1u << r % 32 | 1u << (R + s) % 32 : NOWHERE};
    }
    DEVICE Spot along(Offset slice, int ahead) const {
        const Offset depth = slice + ahead;
        return EVEN || depth < DEPTH ? found_spot(group, depth) : NO_SPOT;
    }
    DEVICE static Position meet(Reach across, Spot along) {
        return {along.at, across.at, (along.outside & across.bits) == 0};
    }
};

// Bits are few enough for small filters; a place that is looked for at each slice has to serve many taps.
constexpr bool SMALL = R + S < 32;
using Pixels = Either<DIRECTION != WGRAD && SMALL, TabledPixels,
                      Either<DIRECTION == WGRAD && SMALL && LAYOUT == NCHW, SpottedPixels, CheckedPixels>>;

// w, or dy for wgrad: positions are sums.
struct FlatReach {
    Offset begin, ahead;
    bool exists;
};
struct Flat {
    int group;
    static constexpr Offset STEP = DIRECTION == FWD ? DEPTH : LAYOUT == NHWC ? 1 : DIRECTION == DGRAD ? TAPS : P * Q;

    // Beyond the last line, the first: nobody writes those sums.
    DEVICE Offset across(Offset i) const {
        return ((i < FLAT_LINES ? i : 0) + (DIRECTION == DGRAD ? 0 : group * KG)) * STEP;
    }
    DEVICE FlatReach along(Offset slice, int ahead) const {
        const Offset depth = slice + ahead;
        const bool exists = EVEN || depth < DEPTH;
        if constexpr (DIRECTION == FWD) return {slice, ahead, exists};
        if constexpr (DIRECTION == DGRAD) {
            const Tap at = tap_of(depth);
            const Offset filter = group * KG + at.channel;
            return {LAYOUT == NHWC ? (filter * TAPS + at.tap) * CG : filter * CG * TAPS + at.tap, 0, exists};
        }
        if constexpr (LAYOUT == NHWC) return {slice * K, ahead * K, exists};
        Digits digits(depth);
        const Offset pixel = digits.next(P * Q);
        return {digits.last() * (K * P * Q) + pixel, 0, exists};
    }
    DEVICE static Position meet(Offset across, FlatReach along) {
        return {along.begin, across + along.ahead, along.exists};
    }
};
