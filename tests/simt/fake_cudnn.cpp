// A cuDNN that convolves on the host by plain loops over the descriptors it was given, and writes down its calls.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {
enum Status { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, COMPILATION_FAILED = 4001 };
enum Type { FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 9 };

struct Tensor { int type = -1, extent[4], stride[4]; };
struct Filter : Tensor {};  // K, C, R, S
struct Convolution { int before[2], after[2], stride[2], dilation[2], mode = -1, compute, groups = 1, math = 0; };
struct Activation { int mode = -1, nan; double coefficient; };
struct Handle { void* stream; };

std::string calls, reason;
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

int output(int in, int taps, const Convolution& v, int i) {
    return (in + v.before[i] + v.after[i] - ((taps - 1) * v.dilation[i] + 1)) / v.stride[i] + 1;
}
bool consistent(const Tensor& x, const Filter& w, const Convolution& v, const Tensor& y) {
    return x.type >= 0 && x.type == w.type && x.type == y.type && v.mode == 1 &&
           v.compute == (x.type == DOUBLE ? DOUBLE : FLOAT) && x.extent[0] == y.extent[0] &&
           x.extent[1] == w.extent[1] * v.groups && y.extent[1] == w.extent[0] &&
           y.extent[2] == output(x.extent[2], w.extent[2], v, 0) && y.extent[3] == output(x.extent[3], w.extent[3], v, 1);
}

// Every product of the layer once: of an input, a filter value and an output.
template <class Visit>
void products(const Tensor& x, const Filter& w, const Convolution& v, const Tensor& y, Visit visit) {
    for (int n = 0; n < y.extent[0]; n++)
        for (int k = 0; k < y.extent[1]; k++)
            for (int p = 0; p < y.extent[2]; p++)
                for (int q = 0; q < y.extent[3]; q++)
                    for (int c = 0; c < w.extent[1]; c++)
                        for (int r = 0; r < w.extent[2]; r++)
                            for (int s = 0; s < w.extent[3]; s++) {
                                const int h = p * v.stride[0] - v.before[0] + r * v.dilation[0];
                                const int u = q * v.stride[1] - v.before[1] + s * v.dilation[1];
                                if (h < 0 || h >= x.extent[2] || u < 0 || u >= x.extent[3]) continue;
                                const int group = k / (w.extent[0] / v.groups);
                                visit(at(x, n, group * w.extent[1] + c, h, u), at(w, k, c, r, s), at(y, n, k, p, q));
                            }
}
int64_t size(const Tensor& t) { return int64_t(t.extent[0]) * t.extent[1] * t.extent[2] * t.extent[3]; }

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

// The graph interface: descriptors as attributes by number, checked as far as they are used here.
enum Kind { POINTWISE, CONVOLUTION, ENGINE, CONFIGURATION, HEURISTICS, PLAN, KNOB = 7, FORWARD = 10, FILTER, DATA, STEP, GRAPH = 15, PACK, TENSOR };
enum Element { A_HANDLE, A_TYPE, A_BOOLEAN, AN_INT64, A_FLOAT, A_DOUBLE, A_POINTER, A_MODE, A_HEURISTIC, A_KNOB, A_NAN, A_NOTE, A_FUNCTION = 14, A_DESCRIPTOR, A_BEHAVIOUR = 19 };
using Knobs = std::vector<std::pair<int, int64_t>>;

struct Backend {
    int kind;
    bool final = false;
    std::map<int, std::string> values;  // bytes
    int number = 0;  // of an engine, or of a configuration's
    Knobs knobs;
    template <class T>
    T get(int attribute, int i = 0) const {
        T value{};
        const auto found = values.find(attribute);
        if (found != values.end()) memcpy(&value, found->second.data() + i * sizeof(T), sizeof(T));
        return value;
    }
    template <class T>
    int count(int attribute) const {
        const auto found = values.find(attribute);
        return found == values.end() ? 0 : static_cast<int>(found->second.size() / sizeof(T));
    }
    const Backend& part(int attribute, int i = 0) const { return *get<Backend*>(attribute, i); }
};

int refuse(int status, const char* why) { return reason = why, status; }

// What each attribute is made of; first the kind of descriptor that has it.
struct Attribute { int kind, element; };
const std::map<int, Attribute> ATTRIBUTES = {
    {0, {POINTWISE, A_FUNCTION}}, {1, {POINTWISE, A_TYPE}}, {2, {POINTWISE, A_NAN}},
    {750, {STEP, A_DESCRIPTOR}}, {751, {STEP, A_DESCRIPTOR}}, {752, {STEP, A_DESCRIPTOR}}, {753, {STEP, A_DESCRIPTOR}},
    {907, {TENSOR, A_BOOLEAN}},
    {100, {CONVOLUTION, A_TYPE}}, {101, {CONVOLUTION, A_MODE}}, {102, {CONVOLUTION, AN_INT64}}, {103, {CONVOLUTION, AN_INT64}},
    {104, {CONVOLUTION, AN_INT64}}, {105, {CONVOLUTION, AN_INT64}}, {106, {CONVOLUTION, AN_INT64}},
    {200, {HEURISTICS, A_HEURISTIC}}, {201, {HEURISTICS, A_DESCRIPTOR}}, {202, {HEURISTICS, A_DESCRIPTOR}},
    {300, {CONFIGURATION, A_DESCRIPTOR}}, {302, {CONFIGURATION, A_DESCRIPTOR}}, {303, {CONFIGURATION, AN_INT64}},
    {400, {PLAN, A_HANDLE}}, {401, {PLAN, A_DESCRIPTOR}}, {402, {PLAN, AN_INT64}}, {600, {KNOB, A_KNOB}}, {601, {KNOB, AN_INT64}},
    {800, {GRAPH, A_HANDLE}}, {801, {GRAPH, A_DESCRIPTOR}}, {802, {GRAPH, AN_INT64}},
    {900, {TENSOR, AN_INT64}}, {901, {TENSOR, A_TYPE}}, {902, {TENSOR, AN_INT64}}, {903, {TENSOR, AN_INT64}}, {906, {TENSOR, AN_INT64}},
    {1000, {PACK, AN_INT64}}, {1001, {PACK, A_POINTER}}, {1003, {PACK, A_POINTER}},
    {1300, {ENGINE, A_DESCRIPTOR}}, {1301, {ENGINE, AN_INT64}}, {1303, {ENGINE, A_NOTE}}, {1305, {ENGINE, A_BEHAVIOUR}},
};
size_t bytes_of(int element) {
    if (element == A_BOOLEAN) return 1;
    return element == A_HANDLE || element == AN_INT64 || element == A_DOUBLE || element == A_POINTER || element == A_DESCRIPTOR ? 8 : 4;
}
// alpha, beta, convolution, w, x, y of a convolution follow this one.
int first_of(int kind) { return kind == FORWARD ? 700 : kind == DATA ? 706 : 712; }
bool fits(int kind, int attribute, int element) {
    if (kind >= FORWARD && kind <= DATA) {
        const int place = attribute - first_of(kind);
        return place >= 0 && place < 6 && (place < 2 ? element == A_FLOAT || element == A_DOUBLE : element == A_DESCRIPTOR);
    }
    const auto found = ATTRIBUTES.find(attribute);
    return found != ATTRIBUTES.end() && found->second.kind == kind && found->second.element == element;
}

struct Operation { Tensor x, y; Filter w; Convolution v; int64_t ids[3]; };  // of x, w and y

Tensor tensor(const Backend& of) {
    Tensor t{of.get<int>(901), {}, {}};
    for (int i = 0; i < 4; i++) t.extent[i] = int(of.get<int64_t>(902, i)), t.stride[i] = int(of.get<int64_t>(903, i));
    return t;
}
Operation operation(const Backend& of) {
    const int first = first_of(of.kind);
    const Backend &v = of.part(first + 2), &w = of.part(first + 3), &x = of.part(first + 4), &y = of.part(first + 5);
    Operation it{tensor(x), tensor(y), Filter{tensor(w)}, {}, {x.get<int64_t>(906), w.get<int64_t>(906), y.get<int64_t>(906)}};
    for (int i = 0; i < 2; i++) {
        it.v.before[i] = int(v.get<int64_t>(105, i)), it.v.after[i] = int(v.get<int64_t>(104, i));
        it.v.stride[i] = int(v.get<int64_t>(103, i)), it.v.dilation[i] = int(v.get<int64_t>(102, i));
    }
    it.v.mode = v.get<int>(101), it.v.compute = v.get<int>(100);
    it.v.groups = it.w.extent[1] ? it.x.extent[1] / it.w.extent[1] : 0;
    if (y.get<bool>(907)) it.y.type = it.y.type == it.v.compute ? it.x.type : -1;  // sums are passed on as they are
    return it;
}
// Of a graph: each step takes what the one before gives, and adds a residual before a bias; the last is no longer virtual.
int chained(const Backend& graph) {
    const Backend& first = graph.part(801);
    const Backend* given = first.get<Backend*>(first_of(first.kind) + 5);
    bool biased = false;
    for (int i = 1; i < graph.count<Backend*>(801); i++) {
        const Backend &step = graph.part(801, i), &how = step.part(750);
        const Tensor y = tensor(*given);
        if (step.get<Backend*>(751) != given || !given->get<bool>(907)) return refuse(BAD_PARAM, "a step does not follow");
        if (how.get<int>(1) != y.type || (how.get<int>(0) == 100 && how.get<int>(2) != 1)) return refuse(BAD_PARAM, "careless");
        if (how.get<int>(0) == 0) {
            const Tensor operand = tensor(step.part(752));
            const bool bias = operand.extent[0] == 1 && operand.extent[1] == y.extent[1] && operand.extent[2] * operand.extent[3] == 1;
            if (!bias && (biased || memcmp(operand.extent, y.extent, sizeof y.extent))) return refuse(NOT_SUPPORTED, "a residual behind a bias");
            biased = bias;
        }
        given = step.get<Backend*>(753);
    }
    if (graph.count<Backend*>(801) > 1 && !biased) return refuse(NOT_SUPPORTED, "a tail without a bias");
    return given->get<bool>(907) ? refuse(BAD_PARAM, "the result is virtual") : SUCCESS;
}

// The engines: what is noted of each, whether it compiles at run time, and which knob it has.
struct Made { std::vector<int> notes; bool compiles; int knob; };
const std::vector<Made> ENGINES = {
    {{9}, false, 0},     // anything
    {{0}, false, 2},     // tensor cores
    {{4}, false, 0},     // in any order
    {{0, 4}, false, 2},  // both
    {{5}, false, 0},     // Winograd: 3x3 with stride 1 alone
    {{0, 1}, false, 0},  // rounds its operands
    {{}, true, 14},      // compiles, unless its knob is 13
    {{}, false, 0},      // takes no layer
    {{}, true, 0},       // compiles, and no heuristic names it
    {{2}, false, 0},     // adds in a narrow type
    {{3}, false, 0},     // FFT, which no heuristic names
};
bool takes(int engine, const Operation& it) {
    if (engine == 4) return it.w.extent[2] == 3 && it.w.extent[3] == 3 && it.v.stride[0] == 1 && it.v.stride[1] == 1;
    return engine != 7;
}
int64_t scratch(const Backend& configuration) {
    int64_t sum = configuration.number * 100;
    for (const auto& knob : configuration.knobs) sum += knob.second;
    return sum;
}
// Twelve choices of one engine's knobs, one of them twice, before others; then what the other heuristic falls back to.
std::vector<std::pair<int, Knobs>> named(int heuristic, const Operation& it) {
    std::vector<std::pair<int, Knobs>> found;
    if (heuristic == 3) {
        for (int choice = 0; choice < 13; choice++) found.push_back({1, {{5, choice % 2}, {2, choice % 12}}});
        found.push_back({3, {{2, -1}}});
        found.push_back({2, {}});
    } else {
        for (int engine : {0, 6, 4, 5, 9})
            if (takes(engine, it)) found.push_back({engine, {}});
    }
    return found;
}
const Operation graph_of(const Backend& of) { return operation(of.part(801)); }
const Backend& graph_under(const Backend& configuration) { return configuration.part(300).part(1300); }

int finalize(Backend& it) {
    switch (it.kind) {
        case TENSOR:
            if (it.count<int64_t>(902) != 4 || it.count<int64_t>(903) != 4 || !it.get<int64_t>(906) || it.get<int64_t>(900) != 16)
                return refuse(BAD_PARAM, "a tensor lacks something");
            break;
        case CONVOLUTION:
            if (it.get<int64_t>(106) != 2) return refuse(BAD_PARAM, "two dimensions are wanted");
            for (int attribute : {102, 103, 104, 105})
                if (it.count<int64_t>(attribute) != 2) return refuse(BAD_PARAM, "two dimensions are wanted");
            break;
        case FORWARD:
        case FILTER:
        case DATA: {
            const int first = first_of(it.kind);
            const Operation made = operation(it);
            const bool wide = made.x.type == DOUBLE;
            const double alpha = wide ? it.get<double>(first) : it.get<float>(first);
            const double beta = wide ? it.get<double>(first + 1) : it.get<float>(first + 1);
            const size_t bytes = wide ? 8 : 4;
            if (it.values[first].size() != bytes || it.values[first + 1].size() != bytes || alpha != 1 || beta != 0)
                return refuse(BAD_PARAM, "the factors are not 1 and 0 in the type of the sums");
            if (!consistent(made.x, made.w, made.v, made.y)) return refuse(BAD_PARAM, "no such convolution");
            break;
        }
        case GRAPH:
            if (!it.get<void*>(800)) return refuse(BAD_PARAM, "a graph without a handle");
            if (const int status = chained(it)) return status;
            if (graph_of(it).y.extent[0] == 19) return refuse(NOT_SUPPORTED, "this graph\n\tis not for me");
            break;
        case HEURISTICS:
            if (it.get<int>(200) == 3 && graph_of(it.part(201)).x.type == BFLOAT16) return refuse(NOT_SUPPORTED, "no tree for bfloat16");
            break;
        case ENGINE:
            it.number = int(it.get<int64_t>(1301));
            if (it.number >= int(ENGINES.size())) return refuse(NOT_SUPPORTED, "there is no such engine");
            if (!takes(it.number, graph_of(it.part(1300)))) return refuse(NOT_SUPPORTED, "the engine does not take this");
            break;
        case CONFIGURATION:
            it.number = it.part(300).number;
            for (int i = 0; i < it.count<Backend*>(302); i++)
                it.knobs.push_back({it.part(302, i).get<int>(600), it.part(302, i).get<int64_t>(601)});
            for (const auto& knob : it.knobs)
                if (knob.first != ENGINES[it.number].knob && knob.first != 5) return refuse(NOT_SUPPORTED, "the engine has no such knob");
            break;
        case PLAN: {
            if (!it.get<void*>(400)) return refuse(BAD_PARAM, "a plan without a handle");
            const Backend& of = it.part(401);
            if (ENGINES[of.number].compiles) calls += "compile engine=" + std::to_string(of.number) + "\n";
            for (const auto& knob : of.knobs)
                if (knob == std::pair<int, int64_t>{14, 13}) return refuse(COMPILATION_FAILED, "an unlucky number");
            break;
        }
        case PACK:
            if (it.count<int64_t>(1000) != it.count<void*>(1001) || !it.count<void*>(1003)) return refuse(BAD_PARAM, "a pack lacks something");
    }
    it.final = true;
    return SUCCESS;
}

template <class T>
void give(void* to, int64_t i, T value) { static_cast<T*>(to)[i] = value; }

// As the library does it: how many there are, and as many of them as there is room for; but knobs are not counted
// for who has no room for any.
int get_attribute(const Backend& it, int attribute, int64_t most, int64_t* count, void* to) {
    const auto numbers = [&](const std::vector<int>& values) {
        *count = int64_t(values.size());
        for (int64_t i = 0; i < *count && i < most; i++) give<int>(to, i, values[i]);
    };
    *count = 1;
    if (attribute == 202) {
        const auto found = named(it.get<int>(200), graph_of(it.part(201)));
        *count = int64_t(found.size());
        for (int64_t i = 0; i < *count && i < most; i++) {
            Backend& configuration = *static_cast<Backend**>(to)[i];
            configuration.final = true, configuration.number = found[i].first, configuration.knobs = found[i].second;
        }
    } else if (attribute == 300) {
        Backend& engine = **static_cast<Backend**>(to);
        engine.final = true, engine.number = it.number;
    } else if (attribute == 302) {
        *count = most ? int64_t(it.knobs.size()) : 0;
        for (int64_t i = 0; i < *count && i < most; i++) {
            Backend& knob = *static_cast<Backend**>(to)[i];
            knob.final = true;
            knob.knobs = {it.knobs[i]};
        }
    } else if (attribute == 303) give<int64_t>(to, 0, scratch(it));
    else if (attribute == 402) give<int64_t>(to, 0, scratch(it.part(401)));
    else if (attribute == 600) give<int>(to, 0, it.knobs.at(0).first);
    else if (attribute == 601) give<int64_t>(to, 0, it.knobs.at(0).second);
    else if (attribute == 802) give<int64_t>(to, 0, int64_t(ENGINES.size()));
    else if (attribute == 1301) give<int64_t>(to, 0, it.number);
    else if (attribute == 1303) numbers(ENGINES[it.number].notes);
    else if (attribute == 1305) numbers(ENGINES[it.number].compiles ? std::vector<int>{0, 3} : std::vector<int>{});
    else return refuse(BAD_PARAM, "an attribute that is not to be read");
    return SUCCESS;
}
}  // namespace

extern "C" {
const char* fake_calls() { return calls.c_str(); }
void fake_forget() { calls.clear(); }
int fake_live() { return live; }

size_t cudnnGetVersion() { return 91900; }
const char* cudnnGetErrorString(int status) {
    if (status == COMPILATION_FAILED) return "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED";
    return status == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : status ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS_SUCCESS";
}
void cudnnGetLastErrorString(char* to, size_t most) {
    std::snprintf(to, most, "%s", reason.c_str());
    reason.clear();
}
size_t cudnnGetCudartVersion() { return 13000; }
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
    *f = Filter{{type, {k, c, r, s}, {c * r * s, r * s, s, 1}}};
    if (format) *f = Filter{{type, {k, c, r, s}, {r * s * c, 1, s * c, c}}};
    return SUCCESS;
}
int cudnnSetConvolution2dDescriptor(Convolution* v, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int compute) {
    *v = Convolution{{ph, pw}, {ph, pw}, {sh, sw}, {dh, dw}, mode, compute};
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

int cudnnBackendCreateDescriptor(int kind, Backend** to) {
    *to = new Backend;
    (*to)->kind = kind;
    return live++, SUCCESS;
}
int cudnnBackendDestroyDescriptor(Backend* it) { return live--, delete it, SUCCESS; }
int cudnnBackendSetAttribute(Backend* it, int attribute, int element, int64_t count, const void* from) {
    if (it->final || !fits(it->kind, attribute, element) || count < 1) return refuse(BAD_PARAM, "no such attribute");
    if (element == A_DESCRIPTOR)
        for (int64_t i = 0; i < count; i++)
            if (!static_cast<Backend* const*>(from)[i]->final) return refuse(BAD_PARAM, "not finalized");
    it->values[attribute] = std::string(static_cast<const char*>(from), count * bytes_of(element));
    return SUCCESS;
}
int cudnnBackendFinalize(Backend* it) { return it->final ? refuse(BAD_PARAM, "finalized twice") : finalize(*it); }
int cudnnBackendGetAttribute(Backend* it, int attribute, int element, int64_t most, int64_t* count, void* to) {
    if (!it->final || !fits(it->kind, attribute, element)) return refuse(BAD_PARAM, "no such attribute");
    return get_attribute(*it, attribute, most, count, to);
}
int cudnnBackendExecute(Handle* handle, Backend* plan, Backend* pack) {
    if (plan->kind != PLAN || pack->kind != PACK || !plan->final || !pack->final) return refuse(BAD_PARAM, "not finalized");
    const Backend &of = plan->part(401), &node = graph_under(of).part(801);
    const Backend& graph = graph_under(of);
    const int steps = graph.count<Backend*>(801) - 1;
    Operation it = operation(node);
    if (steps) it.ids[2] = graph.part(801, steps).part(753).get<int64_t>(906);
    const auto address = [&](int64_t id) -> void* {
        for (int j = 0; j < pack->count<int64_t>(1000); j++)
            if (pack->get<int64_t>(1000, j) == id) return pack->get<void*>(1001, j);
        return nullptr;
    };
    void* at[3] = {address(it.ids[0]), address(it.ids[1]), address(it.ids[2])};
    if (!at[0] || !at[1] || !at[2] || pack->count<int64_t>(1000) < 3) return refuse(BAD_PARAM, "a tensor has no address");
    void* workspace = pack->get<void*>(1003);
    if (scratch(of) && !workspace) return refuse(BAD_PARAM, "no workspace");
    memset(workspace, 0x5a, scratch(of));
    char line[200];
    std::snprintf(line, sizeof line, "%s engine=%d steps=%d type=%d groups=%d stream=%p knobs=",
                  node.kind == FORWARD ? "fwd" : node.kind == DATA ? "dgrad" : "wgrad", of.number, steps, it.x.type, it.v.groups, handle->stream);
    calls += line;
    for (const auto& knob : of.knobs) calls += std::to_string(knob.first) + "-" + std::to_string(knob.second) + " ";
    calls += "\n";
    const Tensor& out = node.kind == FORWARD ? it.y : node.kind == DATA ? it.x : it.w;
    void* to = node.kind == FORWARD ? at[2] : node.kind == DATA ? at[0] : at[1];
    std::vector<double> sums(size(out));
    products(it.x, it.w, it.v, it.y, [&](int64_t i, int64_t j, int64_t k) {
        if (node.kind == FORWARD) sums[k] += get(at[0], it.x.type, i) * get(at[1], it.x.type, j);
        if (node.kind == DATA) sums[i] += get(at[1], it.x.type, j) * get(at[2], it.x.type, k);
        if (node.kind == FILTER) sums[j] += get(at[0], it.x.type, i) * get(at[2], it.x.type, k);
    });
    for (int step = 1; step <= steps; step++) {
        const Backend& now = graph.part(801, step);
        if (now.part(750).get<int>(0) == 100) {
            for (double& sum : sums) sum = sum < 0 ? 0 : sum;
            continue;
        }
        const Tensor operand = tensor(now.part(752));
        const void* from = address(now.part(752).get<int64_t>(906));
        if (!from) return refuse(BAD_PARAM, "a tensor has no address");
        const auto one = [&](int i, int n) { return operand.extent[i] == 1 ? 0 : n; };
        for (int n = 0; n < out.extent[0]; n++)
            for (int k = 0; k < out.extent[1]; k++)
                for (int p = 0; p < out.extent[2]; p++)
                    for (int q = 0; q < out.extent[3]; q++)
                        sums[::at(out, n, k, p, q)] += get(from, it.x.type, ::at(operand, one(0, n), one(1, k), one(2, p), one(3, q)));
    }
    for (int64_t i = 0; i < size(out); i++) put(to, it.x.type, i, sums[i]);
    return SUCCESS;
}
}
