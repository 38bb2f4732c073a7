// What comes before and after products in F(MH x MW, R x S): the transform of a filter, and that of a tile of sums.
#pragma once
#include "winograd.cuh"

// One filter's points: `put(point, value)`.
template <class Put>
DEVICE void transform_filter(const T* w, int group, int row, int depth, Put put) {
    Acc half[R][AW];
#pragma unroll
    for (int r = 0; r < R; r++) {
        Acc taps[S];
#pragma unroll
        for (int s = 0; s < S; s++)
            taps[s] = Acc(to_float(w[filter_at(group, row, depth, BACK ? R - 1 - r : r, BACK ? S - 1 - s : s)]));
        filter_w(taps, half[r]);
    }
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc taps[R], points[AH];
#pragma unroll
        for (int r = 0; r < R; r++) taps[r] = half[r][j];
        filter_h(taps, points);
#pragma unroll
        for (int i = 0; i < AH; i++) put(i * AW + j, points[i]);
    }
}

// Neighbouring outputs of a row that are stored at once: as many as a store takes, of which each row of tiles, and of the
// array, has a whole number. A run is within the array or outside of it, and begins where such stores may.
DEVICE constexpr int stored_at_once(int most) {
    int run = 1;
    while (2 * run <= most && MW % (2 * run) == 0 && OUT_W % (2 * run) == 0) run *= 2;
    return run;
}

// The outputs of a tile, if it exists, from its columns of sums: `read(j, points)`.
template <class Read>
DEVICE void write_columns(Read read, int channel, Offset tile, bool exists, T* out, const T* bias, const T* residual) {
    constexpr int RUN = LAST ? 1 : stored_at_once(16 / sizeof(T));
    struct alignas(RUN * sizeof(T)) Run {
        T value[RUN];
    };
    Acc half[MH][AW];
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc points[AH], pixels[MH];
        read(j, points);
        output_h(points, pixels);
#pragma unroll
        for (int i = 0; i < MH; i++) half[i][j] = pixels[i];
    }
    if (!exists) return;
    const Corner at = corner(tile);
#pragma unroll
    for (int i = 0; i < MH; i++) {
        Acc pixels[MW];
        output_w(half[i], pixels);
        if (at.h + i >= OUT_H) continue;
#pragma unroll
        for (int j = 0; j < MW; j += RUN) {
            if (at.w + j >= OUT_W) continue;
            const Offset place = out_at(at.n, channel, at.h + i, at.w + j);
            Run run;
#pragma unroll
            for (int e = 0; e < RUN; e++) run.value[e] = finished(pixels[j + e], bias, residual, channel, place + e);
            aligned<Run>(out + place) = run;
        }
    }
}

// The same from each of its sums: `sum_of(point)`.
template <class Sums>
DEVICE void write_tile(Sums sum_of, int channel, Offset tile, T* out, const T* bias, const T* residual) {
    const auto read = [&](int j, Acc (&points)[AH]) {
#pragma unroll
        for (int i = 0; i < AH; i++) points[i] = sum_of(i * AW + j);
    };
    write_columns(read, channel, tile, true, out, bias, residual);
}
