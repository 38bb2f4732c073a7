// Winograd's minimal filtering F(MH x MW, R x S), or for wgrad F(R x S, MH x MW): geometry, and the transform of inputs.
// `filter_h filter_w input_h input_w output_h output_w`, the one-dimensional transforms, are generated before
// this text; `sides.cuh` says what they read and write.
#pragma once
#include "../common/sides.cuh"

constexpr int AH = MH + static_cast<int>(R) - 1, AW = MW + static_cast<int>(S) - 1, POINTS = AH * AW;
constexpr Offset TILES_H = (OUT_H + MH - 1) / MH, TILES_W = (OUT_W + MW - 1) / MW, TILES = N * TILES_H * TILES_W;

// The upper left corner of a tile, among outputs.
struct Corner {
    Offset n, h, w;
};
DEVICE Corner corner(Offset tile) {
    return {tile / TILES_W / TILES_H, tile / TILES_W % TILES_H * MH, tile % TILES_W * MW};
}

// A tile's points, column by column: `put(j, points)`. Of a tile or channel that does not exist, zeros.
template <class Put>
DEVICE void transform_input(const T* x, int channel, Offset tile, bool exists, Put put) {
    const Corner first = corner(tile);
    const Offset h0 = first.h - START_H, v0 = first.w - START_W;
    Acc half[AH][AW];
#pragma unroll
    for (int i = 0; i < AH; i++) {
        Acc pixels[AW];
#pragma unroll
        for (int j = 0; j < AW; j++) {
            const bool inside = exists && within(h0 + i, IN_H) && within(v0 + j, IN_W);
            pixels[j] = inside ? Acc(to_float(x[in_at(first.n, channel, h0 + i, v0 + j)])) : Acc(0);
        }
        input_w(pixels, half[i]);
    }
#pragma unroll
    for (int j = 0; j < AW; j++) {
        Acc pixels[AH], points[AH];
#pragma unroll
        for (int i = 0; i < AH; i++) pixels[i] = half[i][j];
        input_h(pixels, points);
        put(j, points);
    }
}
