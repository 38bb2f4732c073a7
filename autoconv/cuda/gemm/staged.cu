// Arrays in another order, and with more or fewer channels: what tensor cores want is NHWC, in whole runs of 16 bytes.
// An array is so many images of channels and places: of x and y these are what they say; for filters, "images" are the
// filters, and places their taps. What the source lacks are zeros, what the target lacks is left out.
#include "../common/common.cuh"

// A block takes AREA of them through shared memory: DEEP channels (all, where they are few) of LONG places. Rows are so far
// apart that neighbouring channels of neighbouring places lie in different banks.
constexpr int AREA = 1024, LONG = AREA / DEEP, BANKS = 32;
constexpr Offset ACROSS = (PLACES + LONG - 1) / LONG, DOWN = (TO_CHANNELS + DEEP - 1) / DEEP;
static_assert(DEEP <= BANKS && BANKS % DEEP == 0 && AREA % THREADS == 0, "whole rows, and whole turns of the threads");
struct Rectangle {
    T at[DEEP][LONG + BANKS / DEEP];
};

// The i-th that a thread takes: neighbouring threads have neighbours in memory.
struct Mine {
    int channel, place;
    DEVICE Mine(bool channels_first, int i) {
        const int at = i * THREADS + static_cast<int>(threadIdx.x);
        channel = channels_first ? at / LONG : at % DEEP;
        place = channels_first ? at % LONG : at / DEEP;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
stage(const T* from, T* to) {
    SHARED(Rectangle, rectangle);
    const Offset block = Offset(blockIdx.x), image = block / (ACROSS * DOWN);
    const Offset place0 = block % ACROSS * LONG, channel0 = block / ACROSS % DOWN * DEEP;
#pragma unroll
    for (int i = 0; i < AREA / THREADS; i++) {
        const Mine mine(FROM_FIRST, i);
        const Offset place = place0 + mine.place, channel = channel0 + mine.channel;
        const bool there = image < FROM_IMAGES && channel < FROM_CHANNELS && place < PLACES;
        const Offset at = FROM_FIRST ? (image * FROM_CHANNELS + channel) * PLACES + place
                                     : (image * PLACES + place) * FROM_CHANNELS + channel;
        rectangle.at[mine.channel][mine.place] = there ? from[at] : T{};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < AREA / THREADS; i++) {
        const Mine mine(TO_FIRST, i);
        const Offset place = place0 + mine.place, channel = channel0 + mine.channel;
        const Offset at = TO_FIRST ? (image * TO_CHANNELS + channel) * PLACES + place
                                   : (image * PLACES + place) * TO_CHANNELS + channel;
        if (channel < TO_CHANNELS && place < PLACES) to[at] = rectangle.at[mine.channel][mine.place];
    }
}
