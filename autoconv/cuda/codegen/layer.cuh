// The layer and the tile as constants, an example of each: `gemm` on float32, so that editors find what the kernels speak
// of. No kernel is compiled with these: `source.py` writes its own in this place, and tables or transforms after them.
#pragma once
#include "ptx.cuh"

using Offset = int;
using T = float;
using Acc = float;
constexpr Offset N = 8;
constexpr Offset C = 64;
constexpr Offset H = 56;
constexpr Offset W = 56;
constexpr Offset K = 64;
constexpr Offset R = 3;
constexpr Offset S = 3;
constexpr Offset P = 56;
constexpr Offset Q = 56;
constexpr Offset GROUPS = 1;
constexpr Offset STRIDE_H = 1;
constexpr Offset STRIDE_W = 1;
constexpr Offset DILATION_H = 1;
constexpr Offset DILATION_W = 1;
constexpr Offset PAD_TOP = 1;
constexpr Offset PAD_LEFT = 1;
constexpr int UNPADDED = 0;
constexpr int LAYOUT = 0;
constexpr int DIRECTION = 0;
constexpr int BIAS = 0;
constexpr int RESIDUAL = 0;
constexpr int RELU = 0;
constexpr int PRELU = 0;
constexpr int THREADS = 256;
constexpr int BLOCKS = 2;
constexpr int BM = 128;
constexpr int BN = 128;
constexpr int BK = 16;
constexpr int TM = 8;
constexpr int TN = 8;
constexpr int PRODUCT_THREADS = 256;
constexpr int PRODUCT_BLOCKS = 2;
constexpr int SPLIT = 1;
constexpr int FAN_IN = 1;
constexpr int STRETCHES = 1;
