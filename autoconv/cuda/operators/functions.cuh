// Functions of single elements, as NumPy has them: a NaN passes all of them.
#pragma once
#include "../codegen/ptx.cuh"

DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
DEVICE float smaller(float a, float b) { return a < b || a != a ? a : b; }
DEVICE float relu(float x) { return x < 0.0f ? 0.0f : x; }
DEVICE float prelu(float x, float slope) { return x < 0.0f ? x * slope : x; }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// A whole number as an integer of one byte, held to the range of its type; NaN as the least.
template <class Integer>
DEVICE Integer held(float value, float least, float most) {
    return static_cast<Integer>(static_cast<int>(!(value >= least) ? least : value <= most ? value : most));
}
