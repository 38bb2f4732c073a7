// What the kernels of this folder are compiled for, an example of each constant and function, so that editors find them.
// No kernel is compiled with these: `units.py` and `elementwise.py` write their own in this place.
#pragma once
#include "functions.cuh"

using Offset = int;
constexpr int THREADS = 256;
constexpr int BLOCKS = 4;
constexpr Offset TOTAL = 600;  // outputs, one to a thread

// elementwise.cu
using Stored = float;
DEVICE void store(Offset i, Stored* out, const void* a, const void* b, const void* c, const void* d, const void* e) {
    out[i] = relu(static_cast<const float*>(a)[i]);
}

// pad.cu: where the element for an output lies in the input; below 0 for the constant.
using Word = unsigned;
constexpr Word FILL = 0;
DEVICE Offset source_of(Offset i) { return i - 1; }

// transpose.cu
constexpr Offset MATRICES = 2, ROWS = 15, COLUMNS = 20;

// windows.cu: LOW and HIGH are the places that count, the image or the padded one.
constexpr bool LARGEST = true;
constexpr Offset INNER = 1, H = 30, W = 40, P = 15, Q = 20;
constexpr Offset WINDOW_H = 2, WINDOW_W = 2, STRIDE_H = 2, STRIDE_W = 2, DILATION_H = 1, DILATION_W = 1;
constexpr Offset PAD_TOP = 0, PAD_LEFT = 0, LOW_H = 0, LOW_W = 0, HIGH_H = 30, HIGH_W = 40;

// rows.cu: a row of elements for each output of a reduction, on one thread or all of a warp.
constexpr Offset OUTPUTS = 600, LENGTH = 4;
constexpr int LANES = 1;
constexpr bool MAXIMUM = false, MEAN = true;
constexpr bool CENTRED = true, BY_ELEMENT = true, BY_ROW = false;  // a scale and a shift for each, or every PERIOD rows
constexpr Offset PERIOD = 4;
DEVICE float root_of(float mean_square) { return sqrtf(mean_square + 1e-5f); }
DEVICE Offset first_of(Offset row) { return row * LENGTH; }
DEVICE Offset further(Offset j) { return j; }

// lrn.cu, and INNER and TOTAL
constexpr Offset CHANNELS = 6, BEFORE = 2, AFTER = 2;
DEVICE float divisor(float sum) { return powf(1.0f + sum, 0.75f); }

// resize.cu, and INNER and TOTAL
constexpr Offset OLD = 10, NEW = 20;
constexpr int TAPS = 2;
