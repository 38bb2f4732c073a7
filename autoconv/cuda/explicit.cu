// im2col: the matrix of implicit GEMM written down, for a library's matrix product.
//   NCHW: columns[n, group, (c,r,s), (p,q)]     NHWC: columns[(n,p,q), (r,s,c)]

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) im2col(const T* x, T* columns) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (long long)N * P * Q * C * R * S) return;
    // from the fastest index to the slowest: q p s r c n, or c s r q p n
    constexpr Offset fast = LAYOUT == NCHW ? Q : C, second = LAYOUT == NCHW ? P : S, third = LAYOUT == NCHW ? S : R;
    constexpr Offset fourth = LAYOUT == NCHW ? R : Q, fifth = LAYOUT == NCHW ? C : P;
    const Offset i0 = static_cast<Offset>(at % fast), i1 = static_cast<Offset>(at / fast % second);
    long long rest = at / fast / second;
    const Offset i2 = static_cast<Offset>(rest % third), i3 = static_cast<Offset>(rest / third % fourth);
    rest = rest / third / fourth;
    const Offset i4 = static_cast<Offset>(rest % fifth), n = static_cast<Offset>(rest / fifth);
    const Offset q = LAYOUT == NCHW ? i0 : i3, p = LAYOUT == NCHW ? i1 : i4, s = LAYOUT == NCHW ? i2 : i1;
    const Offset r = LAYOUT == NCHW ? i3 : i2, c = LAYOUT == NCHW ? i4 : i0;
    const Offset h = p * STRIDE_H - PAD_TOP + r * DILATION_H, v = q * STRIDE_W - PAD_LEFT + s * DILATION_W;
    columns[at] = within(h, H) && within(v, W) ? x[x_at(n, static_cast<int>(c), h, v)] : Rounded<T>::from(0);
}

// The fused tail, in place.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tail(T* y, const T* bias, const T* residual) {
    const Offset at = Offset(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= N * K * P * Q) return;
    const int k = static_cast<int>(LAYOUT == NCHW ? at / (P * Q) % K : at % K);
    y[at] = finished(to_float(y[at]), bias, residual, k, at);
}
