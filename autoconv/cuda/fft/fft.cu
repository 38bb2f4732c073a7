// What stands around cuFFT and the matrix products between spectra: tiles cut out of images and filled up with
// zeros, filters' spectra, transposes that bring frequencies to the front and back, and outputs picked from planes.
// Planes are in the order (group, image, tile down, tile across, channel); spectra hold F_W / 2 + 1 columns.
// `COS_H SIN_H COS_W SIN_W`, the points of the unit circle, are generated before this text.

#include "../common/common.cuh"

constexpr bool LAST = LAYOUT == NHWC;
constexpr int HALF = F_W / 2 + 1, FREQUENCIES = F_H * HALF, SIDE = 32;
constexpr long long TILES = (long long)N * COUNT_H * COUNT_W;
constexpr long long SOURCES = TILES * (DIRECTION == DGRAD ? K : C), GRADIENTS = TILES * K;
constexpr long long SUMS = DIRECTION == WGRAD ? (long long)K * CG : TILES * (DIRECTION == DGRAD ? C : K);
constexpr int REACH_H = static_cast<int>(R - 1) * DILATION_H, REACH_W = static_cast<int>(S - 1) * DILATION_W;
constexpr Acc SCALE = Acc(1) / (F_H * F_W);  // cuFFT's transforms, there and back, multiply by this much too much

struct alignas(2 * sizeof(Acc)) Complex {
    Acc re, im;
};

DEVICE long long my_number() { return (long long)blockIdx.x * THREADS + threadIdx.x; }

// The tile of one output, or tap, of a plane.
DEVICE long long plane_of(Offset n, int channel, int down, int across, int channels) {
    const long long tile = ((long long)n * COUNT_H + down) * COUNT_W + across;
    return (channel / channels * TILES + tile) * channels + channel % channels;
}

// One pixel of the planes of x or dy: a tile begins at TILE_OFFSET + tile * TILE_STRIDE in an image spread out by UP.
template <bool gradient, int UP_H, int UP_W, int FIRST_H, int FIRST_W, int CHANNELS>
DEVICE void cut(const T* from, Acc* planes) {
    constexpr long long ALL = TILES * CHANNELS * GROUPS * F_H * F_W;
    if (my_number() >= ALL) return;
    Index<ALL> rest = static_cast<Index<ALL>>(my_number());
    const auto next = [&](int extent) {
        const int digit = static_cast<int>(rest % extent);
        rest /= extent;
        return digit;
    };
    const int v = next(F_W), u = next(F_H), c = next(CHANNELS), across = next(COUNT_W), down = next(COUNT_H);
    const Offset n = next(static_cast<int>(N));
    const int channel = static_cast<int>(rest) * CHANNELS + c;
    const Offset h = FIRST_H + down * TILE_STRIDE_H + u, w = FIRST_W + across * TILE_STRIDE_W + v;
    constexpr bool DY = gradient || DIRECTION == DGRAD;
    const bool inside = h >= 0 && w >= 0 && h % UP_H == 0 && w % UP_W == 0 && h / UP_H < (DY ? P : H) &&
                        w / UP_W < (DY ? Q : W) && (!gradient || (u < TILE_STRIDE_H && v < TILE_STRIDE_W));
    const Offset at = DY ? y_at(n, channel, h / UP_H, w / UP_W) : x_at(n, channel, h / UP_H, w / UP_W);
    planes[my_number()] = inside ? Acc(to_float(from[at])) : Acc(0);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_cut(const T* from, Acc* planes) {
    if constexpr (DIRECTION == DGRAD)
        cut<false, STRIDE_H, STRIDE_W, TILE_OFFSET_H, TILE_OFFSET_W, KG>(from, planes);
    else
        cut<false, 1, 1, TILE_OFFSET_H, TILE_OFFSET_W, CG>(from, planes);
}

// Of the filters' gradient: disjoint tiles of dy, spread out by the stride.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_cut_gradient(const T* from, Acc* planes) {
    cut<true, STRIDE_H, STRIDE_W, 0, 0, KG>(from, planes);
}

// Conjugate spectra of filters, W[frequency, group, channel in, channel out], by the definition: taps are few.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_filter(const T* w, Complex* spectra) {
    constexpr bool BACK = DIRECTION == DGRAD;
    constexpr int IN = BACK ? KG : CG, OUT = BACK ? CG : KG;
    if (my_number() >= (long long)FREQUENCIES * GROUPS * IN * OUT) return;
    const int out = static_cast<int>(my_number() % OUT), in = static_cast<int>(my_number() / OUT % IN);
    const int group = static_cast<int>(my_number() / (OUT * IN) % GROUPS);
    const int frequency = static_cast<int>(my_number() / ((long long)OUT * IN * GROUPS));
    const int u = frequency / HALF, v = frequency % HALF;
    const T* taps = w + w_at(group * KG + (BACK ? in : out), BACK ? out : in, 0, 0);
    constexpr Offset ROW = LAST ? S * CG : S, COLUMN = LAST ? CG : 1;
    Complex sum = {0, 0};
    for (int r = 0; r < R; r++) {
        Complex row = {0, 0};
#pragma unroll 1  // what many taps need at once would spill
        for (int s = 0; s < S; s++) {
            const Acc tap = Acc(to_float(taps[r * ROW + s * COLUMN]));
            const int turn = (BACK ? REACH_W - s * DILATION_W : s * DILATION_W) * v % F_W;
            row.re += tap * COS_W[turn];
            row.im += tap * SIN_W[turn];
        }
        const int turn = (BACK ? REACH_H - r * DILATION_H : r * DILATION_H) * u % F_H;
        sum.re += row.re * COS_H[turn] - row.im * SIN_H[turn];
        sum.im += row.re * SIN_H[turn] + row.im * COS_H[turn];
    }
    spectra[my_number()] = sum;
}

struct Square {
    Complex at[SIDE][SIDE + 1];  // odd, so that a column lies in different banks
};

// to[COLUMNS, ROWS] = from[ROWS, COLUMNS], or its conjugate, by squares in shared memory.
template <long long ROWS, long long COLUMNS, bool conjugate>
DEVICE void transpose(const Complex* from, Complex* to) {
    SHARED(Square, square);
    constexpr long long ACROSS = (COLUMNS + SIDE - 1) / SIDE;
    const long long row0 = blockIdx.x / ACROSS * SIDE, column0 = blockIdx.x % ACROSS * SIDE;
    const int fast = static_cast<int>(threadIdx.x) % SIDE, slow = static_cast<int>(threadIdx.x) / SIDE;
#pragma unroll
    for (int i = slow; i < SIDE; i += THREADS / SIDE)
        if (row0 + i < ROWS && column0 + fast < COLUMNS) square.at[i][fast] = from[(row0 + i) * COLUMNS + column0 + fast];
    __syncthreads();
#pragma unroll
    for (int i = slow; i < SIDE; i += THREADS / SIDE) {
        if (row0 + fast >= ROWS || column0 + i >= COLUMNS) continue;
        const Complex value = square.at[fast][i];
        to[(column0 + i) * ROWS + row0 + fast] = {value.re, conjugate ? -value.im : value.im};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_transpose(const Complex* from, Complex* to) {
    transpose<SOURCES, FREQUENCIES, false>(from, to);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_transpose_gradient(const Complex* from, Complex* to) {
    transpose<GRADIENTS, FREQUENCIES, true>(from, to);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_transpose_back(const Complex* from, Complex* to) {
    transpose<FREQUENCIES, SUMS, false>(from, to);
}

// The first TILE_STRIDE rows and columns of a plane are outputs, or every STRIDE-th of them.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fft_output(const Acc* planes, T* out, const T* bias, const T* residual) {
    constexpr bool BACK = DIRECTION == DGRAD;
    constexpr Offset CHANNELS = BACK ? C : K, HEIGHT = BACK ? H : P, WIDTH = BACK ? W : Q;
    if (my_number() >= (long long)N * CHANNELS * HEIGHT * WIDTH) return;
    const Offset at = static_cast<Offset>(my_number()), pixel = LAST ? at / CHANNELS : at;
    const int channel = static_cast<int>(LAST ? at % CHANNELS : at / (HEIGHT * WIDTH) % CHANNELS);
    const Offset n = LAST ? pixel / (HEIGHT * WIDTH) : at / (CHANNELS * HEIGHT * WIDTH);
    const int h = static_cast<int>(pixel / WIDTH % HEIGHT * (BACK ? 1 : STRIDE_H));
    const int w = static_cast<int>(pixel % WIDTH * (BACK ? 1 : STRIDE_W));
    const long long plane = plane_of(n, channel, h / TILE_STRIDE_H, w / TILE_STRIDE_W, BACK ? CG : KG);
    const Acc sum = planes[(plane * F_H + h % TILE_STRIDE_H) * F_W + w % TILE_STRIDE_W] * SCALE;
    out[at] = finished(sum, bias, residual, channel, at);
}

// Planes are here of the pairs (filter, channel of its group); the taps are their first rows and columns.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fft_taps(const Acc* planes, T* dw) {
    if (my_number() >= (long long)K * CG * R * S) return;
    const Offset at = static_cast<Offset>(my_number());
    const Offset c = LAST ? at % CG : at / (R * S) % CG, k = at / (CG * R * S);
    const Offset s = LAST ? at / CG % S : at % S, r = LAST ? at / (CG * S) % R : at / S % R;
    const long long plane = (long long)k * CG + c;
    dw[at] = Rounded<T>::from(planes[(plane * F_H + r * DILATION_H) * F_W + s * DILATION_W] * SCALE);
}
