// The matrices of explicit GEMM: of N images at a time, X[taps, places] as columns of pixels and Y[filters, places].
//   NCHW         X[n, c,r,s, p,q]  Y[n, k, p,q]      (Y is y itself)
//   NCHW, MERGED X[c,r,s, n,p,q]   Y[k, n,p,q]
//   NHWC         X[group, n,p,q, r,s,c]  Y[n,p,q, k]  (Y is y itself)

#include "../common/common.cuh"

constexpr bool LAST = LAYOUT == NHWC;
constexpr long long COLUMNS = (long long)N * P * Q * C * R * S;
using Number = Index<COLUMNS>;

// A number's digits, the lowest first.
struct Digits {
    Number rest;
    DEVICE Offset next(Offset extent) {
        const Offset digit = static_cast<Offset>(rest % extent);
        rest /= extent;
        return digit;
    }
};

DEVICE long long my_number() { return (long long)blockIdx.x * THREADS + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) im2col(const T* x, T* columns) {
    if (my_number() >= COLUMNS) return;
    const Number at = static_cast<Number>(my_number());
    Digits digits{at};
    Offset n = 0, c = 0, r = 0, s = 0, p = 0, q = 0;
    if constexpr (LAST) {
        c = digits.next(CG), s = digits.next(S), r = digits.next(R);
        q = digits.next(Q), p = digits.next(P), n = digits.next(N);
        c += static_cast<Offset>(digits.rest) * CG;
    } else {
        q = digits.next(Q), p = digits.next(P);
        if constexpr (MERGED) n = digits.next(N);
        s = digits.next(S), r = digits.next(R), c = digits.next(C);
        if constexpr (!MERGED) n = static_cast<Offset>(digits.rest);
    }
    const Offset h = p * STRIDE_H - PAD_TOP + r * DILATION_H, v = q * STRIDE_W - PAD_LEFT + s * DILATION_W;
    columns[at] = within(h, H) && within(v, W) ? x[x_at(n, static_cast<int>(c), h, v)] : Rounded<T>::from(0);
}

DEVICE Number column_at(Offset n, Offset c, Offset r, Offset s, Offset p, Offset q) {
    const Number place = (Number(n) * P + p) * Q + q, tap = (r * S + s) * CG + c % CG;
    if constexpr (LAST) return (c / CG * Number(N * P * Q) + place) * (CG * R * S) + tap;
    if constexpr (MERGED) return ((Number(c) * R + r) * S + s) * (N * P * Q) + place;
    return (((Number(n) * C + c) * R + r) * S + s) * (P * Q) + p * Q + q;
}

// The gradient of the input gathers what its pixel has contributed to, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) col2im(const Acc* columns, T* dx) {
    if (my_number() >= (long long)N * C * H * W) return;
    const Offset at = static_cast<Offset>(my_number());
    const Offset c = LAST ? at % C : at / (H * W) % C, pixel = LAST ? at / C : at;
    const Offset v = pixel % W, h = pixel / W % H, n = LAST ? pixel / W / H : at / (C * H * W);
    Acc sum = 0;
    for (int r = 0; r < R; r++) {
        const Offset p = output_of(h, r, PAD_TOP, STRIDE_H, DILATION_H, P);
        if (p < 0) continue;
#pragma unroll 4  // what many taps need at once would spill
        for (int s = 0; s < S; s++) {
            const Offset q = output_of(v, s, PAD_LEFT, STRIDE_W, DILATION_W, Q);
            if (q >= 0) sum += columns[column_at(n, c, r, s, p, q)];
        }
    }
    dx[at] = Rounded<T>::from(sum);
}

// Where an element of y lies in Y.
DEVICE Offset merged_at(Offset at) {
    return MERGED && !LAST ? (at / (P * Q) % K * N + at / (K * P * Q)) * (P * Q) + at % (P * Q) : at;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) merge(const T* y, T* merged) {
    if (my_number() >= (long long)N * K * P * Q) return;
    const Offset at = static_cast<Offset>(my_number());
    merged[merged_at(at)] = y[at];
}

// y from Y, with the fused epilogue; where no order is to be changed, Y may be y itself.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
epilogue(const Acc* sums, T* y, const T* bias, const T* residual) {
    if (my_number() >= (long long)N * K * P * Q) return;
    const Offset at = static_cast<Offset>(my_number());
    const int k = static_cast<int>(LAST ? at % K : at / (P * Q) % K);
    y[at] = finished(sums[merged_at(at)], bias, residual, k, at);
}

// The filters' gradient from sums in the wider type.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) narrow(const Acc* sums, T* dw) {
    if (my_number() >= (long long)K * CG * R * S) return;
    dw[my_number()] = Rounded<T>::from(sums[my_number()]);
}
