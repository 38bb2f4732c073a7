// Arrays in another order, and with more or fewer channels: what tensor cores want is NHWC, in whole runs of 16 bytes.
// An array is so many images of channels and places: of x and y these are what they say; for filters, "images" are the
// filters, and places their taps. What the source lacks are zeros, what the target lacks is left out.
#include "../common/common.cuh"

constexpr int SIDE = 32;  // of the square that a block takes through shared memory
constexpr int ROWS = THREADS / SIDE;
constexpr Offset ACROSS = (PLACES + SIDE - 1) / SIDE, DOWN = (TO_CHANNELS + SIDE - 1) / SIDE;
struct Square {
    T at[SIDE][SIDE + 1];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
stage(const T* from, T* to) {
    SHARED(Square, square);
    const int lane = static_cast<int>(threadIdx.x) % SIDE, row = static_cast<int>(threadIdx.x) / SIDE;
    const Offset block = Offset(blockIdx.x), image = block / (ACROSS * DOWN);
    const Offset place0 = block % ACROSS * SIDE, channel0 = block / ACROSS % DOWN * SIDE;
#pragma unroll
    for (int i = 0; i < SIDE; i += ROWS) {
        const int across = FROM_FIRST ? lane : row + i, down = FROM_FIRST ? row + i : lane;
        const Offset place = place0 + across, channel = channel0 + down;
        const bool there = image < FROM_IMAGES && channel < FROM_CHANNELS && place < PLACES;
        const Offset at = FROM_FIRST ? (image * FROM_CHANNELS + channel) * PLACES + place
                                     : (image * PLACES + place) * FROM_CHANNELS + channel;
        square.at[down][across] = there ? from[at] : T{};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE; i += ROWS) {
        const int across = TO_FIRST ? lane : row + i, down = TO_FIRST ? row + i : lane;
        const Offset place = place0 + across, channel = channel0 + down;
        const Offset at = TO_FIRST ? (image * TO_CHANNELS + channel) * PLACES + place
                                   : (image * PLACES + place) * TO_CHANNELS + channel;
        if (channel < TO_CHANNELS && place < PLACES) to[at] = square.at[down][across];
    }
}
