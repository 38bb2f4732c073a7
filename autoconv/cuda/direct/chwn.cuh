// Direct convolution with images innermost, as cuda-convnet has its arrays: X[c, h, w, n], and Y[k, p, q, n] where
// channels come first. A block computes one place of the output, BM channels of BN images of it, as the matrix
// product of filters and those taps that meet the image there: what padding would add is not zero but absent, in
// dgrad what strides skip as well, and neighbours in the product are neighbours in memory whatever the layer.
//
// Packed filters are U[group, channel, r, s, KEPT], the channels of the output filled up to whole words with zeros.
#pragma once
#include "../common/sides.cuh"

constexpr int IMAGES = ceil_div(static_cast<int>(N), 4) * 4;  // filled up likewise
constexpr int KEPT = ceil_div(static_cast<int>(ROWS), 4) * 4, TAPS = static_cast<int>(R * S);
constexpr Offset IN = GROUPS * DEPTH * IN_H * IN_W, OUT = GROUPS * ROWS * OUT_H * OUT_W;  // of one image
// X, then Y, in the workspace
constexpr long long Y_AT = ((long long)IN * IMAGES * (int)sizeof(T) + 255) / 256 * 256;
