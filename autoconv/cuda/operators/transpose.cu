// Matrices with rows for columns, in squares that pass through shared memory, so that both sides are lines of memory.

#include "shapes.cuh"

constexpr int SIDE = 32, LINES = THREADS / SIDE;
constexpr Offset ACROSS = (COLUMNS + SIDE - 1) / SIDE, DOWN = (ROWS + SIDE - 1) / SIDE;

struct Square {
    Word at[SIDE][SIDE + 1];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) transpose(Word* out, const Word* x) {
    SHARED(Square, square);
    const int lane = static_cast<int>(threadIdx.x) % SIDE, line = static_cast<int>(threadIdx.x) / SIDE;
    const Offset block = blockIdx.x, matrix = block / ACROSS / DOWN * ROWS * COLUMNS;
    const Offset column = block % ACROSS * SIDE, row = block / ACROSS % DOWN * SIDE;
#pragma unroll
    for (int i = line; i < SIDE; i += LINES)
        if (row + i < ROWS && column + lane < COLUMNS)
            square.at[i][lane] = x[matrix + (row + i) * COLUMNS + column + lane];
    __syncthreads();
#pragma unroll
    for (int i = line; i < SIDE; i += LINES)
        if (column + i < COLUMNS && row + lane < ROWS)
            out[matrix + (column + i) * ROWS + row + lane] = square.at[lane][i];
}
