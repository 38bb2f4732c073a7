// What implicit GEMMs share: the matrices that are never written down, and the way out of what is computed.
// To a group, one operand is gathered from pixels, the other is flat; both have the same depth:
//           pixels, by            flat, by      depth
//   fwd     places n,p,q of y     filters k     taps c,r,s
//   dgrad   places n,h,w of dx    channels c    taps k,r,s
//   wgrad   taps c,r,s            filters k     places n,p,q
// Taps are in the order of memory, so channels come last for NHWC and neighbours there are neighbours here.
#pragma once
#include "common.cuh"

constexpr int TAPS = R * S;
constexpr Offset DEPTH = DIRECTION == FWD ? CG * TAPS : DIRECTION == DGRAD ? KG * TAPS : N * P * Q;
constexpr Offset PIXEL_LINES = DIRECTION == FWD ? N * P * Q : DIRECTION == DGRAD ? N * H * W : CG * TAPS;
constexpr Offset FLAT_LINES = DIRECTION == DGRAD ? CG : KG;
constexpr Offset TAP_CHANNELS = DIRECTION == DGRAD ? KG : CG;

template <bool first, class First, class Second>
struct EitherOf {
    using type = First;
};
template <class First, class Second>
struct EitherOf<false, First, Second> {
    using type = Second;
};
template <bool first, class First, class Second>
using Either = typename EitherOf<first, First, Second>::type;

using Natural = Either<sizeof(Offset) == 4, unsigned, unsigned long long>;  // quicker to divide than Offset

// The digits of a number that is not negative, the lowest first.
struct Digits {
    Natural rest;
    DEVICE explicit Digits(Offset number) : rest(static_cast<Natural>(number)) {}
    DEVICE Offset next(Offset extent) {
        const auto digit = rest % static_cast<Natural>(extent);
        rest /= static_cast<Natural>(extent);
        return static_cast<Offset>(digit);
    }
    DEVICE Offset last() const { return static_cast<Offset>(rest); }
};

// A channel (or a filter, for dgrad) and a tap of it.
struct Tap {
    Offset channel, tap;
};
DEVICE Tap tap_of(Offset index) {
    Digits digits(index);
    const Offset first = digits.next(LAYOUT == NHWC ? TAP_CHANNELS : TAPS);
    return LAYOUT == NHWC ? Tap{first, digits.last()} : Tap{digits.last(), first};
}

struct Place {
    Offset n, i, j;
};
DEVICE Place place(Offset index, Offset height, Offset width) {
    Digits digits(index);
    const Offset j = digits.next(width), i = digits.next(height);
    return {digits.last(), i, j};
}

// The array of pixels: x, or dy for dgrad.
constexpr bool GRADIENT = DIRECTION == DGRAD;
constexpr Offset HEIGHT = GRADIENT ? P : H, WIDTH = GRADIENT ? Q : W, CHANNELS = GRADIENT ? K : C;
constexpr Offset PIXEL = LAYOUT == NHWC ? CHANNELS : 1, CHANNEL = LAYOUT == NHWC ? 1 : HEIGHT * WIDTH;

// Neighbours that travel at once.
template <class Element, int COUNT>
struct alignas(COUNT * sizeof(Element) < 16 ? COUNT * sizeof(Element) : 16) Run {
    Element value[COUNT];
};

// Neighbours in the output are neighbours in the flat operand or among the pixels; LINE of them lie together.
constexpr bool ALONG_FLAT = LAYOUT == NHWC && DIRECTION != WGRAD;
constexpr Offset LINE = ALONG_FLAT ? FLAT_LINES : DIRECTION == FWD ? P * Q : DIRECTION == DGRAD ? H * W : PIXEL_LINES;
constexpr long long TOTAL = (long long)GROUPS * FLAT_LINES * PIXEL_LINES;

// How many neighbours, of so many at most, are always together and aligned.
DEVICE constexpr int together(int most) { return LINE % most == 0 ? most : together(most / 2); }

// Where an element of the product lies in the output.
DEVICE Offset output_at(int group, Offset pixel, Offset flat) {
    if constexpr (DIRECTION == WGRAD) return (group * KG + flat) * LINE + pixel;
    if constexpr (LAYOUT == NHWC) return pixel * (DIRECTION == FWD ? K : C) + group * FLAT_LINES + flat;
    Digits digits(pixel);
    const Offset at = digits.next(LINE);
    return (digits.last() * (DIRECTION == FWD ? K : C) + group * FLAT_LINES + flat) * LINE + at;
}

struct Output {
    T* out;
    const T *bias, *residual;

    // Neighbours, the first of filter k.
    template <int COUNT>
    DEVICE void write(const Acc (&sum)[COUNT], Offset at, int k) const {
        constexpr int BIASES = ALONG_FLAT ? COUNT : 1;
        Run<T, BIASES> b = {}, s = {};
        Run<T, COUNT> r = {}, y;
        if constexpr (BIAS) b = aligned<Run<T, BIASES>>(bias + k);
        if constexpr (PRELU) s = aligned<Run<T, BIASES>>(bias + SLOPES + k);
        if constexpr (RESIDUAL) r = aligned<Run<T, COUNT>>(residual + at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) y.value[i] = finished(sum[i], b.value, s.value, r.value, i % BIASES, i);
        aligned<Run<T, COUNT>>(out + at) = y;
    }
};
