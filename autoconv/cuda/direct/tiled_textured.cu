// Direct convolution of a texture, which does the padding.

#include "tiled.cuh"

extern "C" __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
direct_textured(const Texture x, const Acc* U, T* out, const T* bias, const T* residual) {
    SHARED_DYNAMIC(Shared, shared);
    convolve_tile(shared, x, U, out, bias, residual);
}
