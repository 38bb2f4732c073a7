// A cuDNN that convolves on the host by plain loops over the descriptors it was given, and writes down its calls.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {
enum Status { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000 };
enum Type { FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 9 };

struct Tensor { int type = -1, extent[4], stride[4]; };
struct Filter { int type = -1, format, k, c, r, s; };
struct Convolution { int pad[2], stride[2], dilation[2], mode = -1, compute, groups = 1, math = 0; };
struct Activation { int mode = -1, nan; double coefficient; };
struct Handle { void* stream; };

std::string calls;
int live = 0;  // descriptors

double get(const void* p, int type, int64_t at) {
    if (type == FLOAT) return static_cast<const float*>(p)[at];
    if (type == DOUBLE) return static_cast<const double*>(p)[at];
    if (type == HALF) return static_cast<double>(static_cast<const _Float16*>(p)[at]);
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(p)[at]) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
void put(void* p, int type, int64_t at, double value) {
    if (type == FLOAT) static_cast<float*>(p)[at] = static_cast<float>(value);
    if (type == DOUBLE) static_cast<double*>(p)[at] = value;
    if (type == HALF) static_cast<_Float16*>(p)[at] = static_cast<_Float16>(value);
    if (type == BFLOAT16) {
        const float narrow = static_cast<float>(value);
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        static_cast<uint16_t*>(p)[at] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
double scalar(const void* p, int type) { return type == DOUBLE ? *static_cast<const double*>(p) : *static_cast<const float*>(p); }
int64_t at(const Tensor& t, int n, int c, int h, int w) {
    return int64_t(n) * t.stride[0] + int64_t(c) * t.stride[1] + int64_t(h) * t.stride[2] + int64_t(w) * t.stride[3];
}
int64_t at(const Filter& f, int k, int c, int r, int s) {
    return f.format ? ((int64_t(k) * f.r + r) * f.s + s) * f.c + c : ((int64_t(k) * f.c + c) * f.r + r) * f.s + s;
}

int output(int in, int taps, const Convolution& v, int i) {
    return (in + 2 * v.pad[i] - ((taps - 1) * v.dilation[i] + 1)) / v.stride[i] + 1;
}
bool consistent(const Tensor& x, const Filter& w, const Convolution& v, const Tensor& y) {
    return x.type >= 0 && x.type == w.type && x.type == y.type && v.mode == 1 &&
           v.compute == (x.type == DOUBLE ? DOUBLE : FLOAT) && x.extent[0] == y.extent[0] &&
           x.extent[1] == w.c * v.groups && y.extent[1] == w.k && y.extent[2] == output(x.extent[2], w.r, v, 0) &&
           y.extent[3] == output(x.extent[3], w.s, v, 1);
}

// Every product of the layer once: of an input, a filter value and an output.
template <class Visit>
void products(const Tensor& x, const Filter& w, const Convolution& v, const Tensor& y, Visit visit) {
    for (int n = 0; n < y.extent[0]; n++)
        for (int k = 0; k < y.extent[1]; k++)
            for (int p = 0; p < y.extent[2]; p++)
                for (int q = 0; q < y.extent[3]; q++)
                    for (int c = 0; c < w.c; c++)
                        for (int r = 0; r < w.r; r++)
                            for (int s = 0; s < w.s; s++) {
                                const int h = p * v.stride[0] - v.pad[0] + r * v.dilation[0];
                                const int u = q * v.stride[1] - v.pad[1] + s * v.dilation[1];
                                if (h < 0 || h >= x.extent[2] || u < 0 || u >= x.extent[3]) continue;
                                visit(at(x, n, k / (w.k / v.groups) * w.c + c, h, u), at(w, k, c, r, s), at(y, n, k, p, q));
                            }
}
int64_t size(const Tensor& t) { return int64_t(t.extent[0]) * t.extent[1] * t.extent[2] * t.extent[3]; }
int64_t size(const Filter& f) { return int64_t(f.k) * f.c * f.r * f.s; }

int query(int algorithm, int unsupported, const Tensor& x, const Filter& w, const Convolution& v, const Tensor& y, size_t* bytes) {
    if (!consistent(x, w, v, y)) return BAD_PARAM;
    if (algorithm == unsupported) return NOT_SUPPORTED;
    *bytes = static_cast<size_t>(algorithm) * 64;
    return SUCCESS;
}
int begin(const char* name, void* handle, int algorithm, const Convolution& v, void* workspace, size_t bytes, const Tensor& x) {
    if (bytes != static_cast<size_t>(algorithm) * 64 || (bytes && !workspace)) return BAD_PARAM;
    memset(workspace, 0x5a, bytes);
    char line[200];
    std::snprintf(line, sizeof line, "%s algorithm=%d math=%d groups=%d type=%d stream=%p\n", name, algorithm, v.math, v.groups,
                  x.type, static_cast<Handle*>(handle)->stream);
    calls += line;
    return SUCCESS;
}
}  // namespace

extern "C" {
const char* fake_calls() { return calls.c_str(); }
void fake_forget() { calls.clear(); }
int fake_live() { return live; }

size_t cudnnGetVersion() { return 91900; }
const char* cudnnGetErrorString(int status) {
    return status == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : status ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS_SUCCESS";
}
int cudnnCreate(Handle** to) { return *to = new Handle{}, SUCCESS; }
int cudnnSetStream(Handle* handle, void* stream) { return handle->stream = stream, SUCCESS; }

#define LIFE(Kind)                                                                               \
    int cudnnCreate##Kind##Descriptor(Kind** to) { return live++, *to = new Kind, SUCCESS; }     \
    int cudnnDestroy##Kind##Descriptor(Kind* it) { return live--, delete it, SUCCESS; }
LIFE(Tensor)
LIFE(Filter)
LIFE(Convolution)
LIFE(Activation)

int cudnnSetTensor4dDescriptorEx(Tensor* t, int type, int n, int c, int h, int w, int sn, int sc, int sh, int sw) {
    *t = Tensor{type, {n, c, h, w}, {sn, sc, sh, sw}};
    return SUCCESS;
}
int cudnnSetFilter4dDescriptor(Filter* f, int type, int format, int k, int c, int r, int s) {
    *f = Filter{type, format, k, c, r, s};
    return SUCCESS;
}
int cudnnSetConvolution2dDescriptor(Convolution* v, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int compute) {
    *v = Convolution{{ph, pw}, {sh, sw}, {dh, dw}, mode, compute};
    return SUCCESS;
}
int cudnnSetConvolutionGroupCount(Convolution* v, int groups) { return v->groups = groups, SUCCESS; }
int cudnnSetConvolutionMathType(Convolution* v, int math) { return v->math = math, SUCCESS; }
int cudnnSetActivationDescriptor(Activation* a, int mode, int nan, double coefficient) {
    *a = Activation{mode, nan, coefficient};
    return nan == 1 && coefficient == 0 ? SUCCESS : BAD_PARAM;
}

int cudnnGetConvolutionForwardWorkspaceSize(Handle*, Tensor* x, Filter* w, Convolution* v, Tensor* y, int algorithm, size_t* bytes) {
    return query(algorithm, 3, *x, *w, *v, *y, bytes);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(Handle*, Filter* w, Tensor* y, Convolution* v, Tensor* x, int algorithm, size_t* bytes) {
    return query(algorithm, 2, *x, *w, *v, *y, bytes);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle*, Tensor* x, Tensor* y, Convolution* v, Filter* w, int algorithm, size_t* bytes) {
    return query(algorithm, 4, *x, *w, *v, *y, bytes);
}

int cudnnConvolutionForward(Handle* handle, const void* alpha, Tensor* x, const void* a, Filter* w, const void* b, Convolution* v,
                            int algorithm, void* workspace, size_t bytes, const void* beta, Tensor* y, void* out) {
    if (scalar(alpha, x->type) != 1 || scalar(beta, x->type) != 0) return BAD_PARAM;
    if (int status = begin("forward", handle, algorithm, *v, workspace, bytes, *x)) return status;
    std::vector<double> sums(size(*y));
    products(*x, *w, *v, *y, [&](int64_t i, int64_t j, int64_t k) { sums[k] += get(a, x->type, i) * get(b, x->type, j); });
    for (int64_t i = 0; i < size(*y); i++) put(out, x->type, i, sums[i]);
    return SUCCESS;
}
int cudnnConvolutionBiasActivationForward(Handle* handle, const void* alpha, Tensor* x, const void* a, Filter* w, const void* b,
                                          Convolution* v, int algorithm, void* workspace, size_t bytes, const void* more,
                                          Tensor* zt, const void* z, Tensor* bt, const void* bias, Activation* activation,
                                          Tensor* y, void* out) {
    if (scalar(alpha, x->type) != 1 || !bias || bt->type != x->type || bt->extent[1] != y->extent[1]) return BAD_PARAM;
    if (activation->mode == 5 && algorithm != 1) return NOT_SUPPORTED;  // the identity is in one algorithm alone
    if (memcmp(zt, y, sizeof *y)) return BAD_PARAM;
    if (int status = begin("fused", handle, algorithm, *v, workspace, bytes, *x)) return status;
    std::vector<double> sums(size(*y));
    products(*x, *w, *v, *y, [&](int64_t i, int64_t j, int64_t k) { sums[k] += get(a, x->type, i) * get(b, x->type, j); });
    for (int n = 0; n < y->extent[0]; n++)
        for (int k = 0; k < y->extent[1]; k++)
            for (int p = 0; p < y->extent[2]; p++)
                for (int q = 0; q < y->extent[3]; q++) {
                    const int64_t i = at(*y, n, k, p, q);
                    double sum = sums[i] + get(bias, x->type, at(*bt, 0, k, 0, 0));
                    if (scalar(more, x->type) != 0) sum += scalar(more, x->type) * get(z, x->type, i);
                    put(out, x->type, i, activation->mode == 1 && sum < 0 ? 0 : sum);
                }
    return SUCCESS;
}
int cudnnConvolutionBackwardData(Handle* handle, const void* alpha, Filter* w, const void* b, Tensor* y, const void* dy, Convolution* v,
                                 int algorithm, void* workspace, size_t bytes, const void* beta, Tensor* x, void* dx) {
    if (scalar(alpha, x->type) != 1 || scalar(beta, x->type) != 0) return BAD_PARAM;
    if (int status = begin("data", handle, algorithm, *v, workspace, bytes, *x)) return status;
    std::vector<double> sums(size(*x));
    products(*x, *w, *v, *y, [&](int64_t i, int64_t j, int64_t k) { sums[i] += get(dy, x->type, k) * get(b, x->type, j); });
    for (int64_t i = 0; i < size(*x); i++) put(dx, x->type, i, sums[i]);
    return SUCCESS;
}
int cudnnConvolutionBackwardFilter(Handle* handle, const void* alpha, Tensor* x, const void* a, Tensor* y, const void* dy, Convolution* v,
                                   int algorithm, void* workspace, size_t bytes, const void* beta, Filter* w, void* dw) {
    if (scalar(alpha, x->type) != 1 || scalar(beta, x->type) != 0) return BAD_PARAM;
    if (int status = begin("filter", handle, algorithm, *v, workspace, bytes, *x)) return status;
    std::vector<double> sums(size(*w));
    products(*x, *w, *v, *y, [&](int64_t i, int64_t j, int64_t k) { sums[j] += get(a, x->type, i) * get(dy, x->type, k); });
    for (int64_t i = 0; i < size(*w); i++) put(dw, x->type, i, sums[i]);
    return SUCCESS;
}
}
