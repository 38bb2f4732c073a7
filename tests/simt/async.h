// What works behind the backs of Hopper's threads: barriers in shared memory that count arrivals and bytes, the
// tensor copy engine, matrix products of a warpgroup. Each copy and each product happens when the seed says so,
// at the latest when nothing else can go on; until then it has read and written nothing.
//
// What a queued operation needs is copied: the thread that asked for it may be gone when it happens. Only sums
// are written where they are, in the stacks of threads that have to wait for them.
#pragma once

#include "simt.h"

namespace simt {

constexpr int warpgroup_size = 128, most_threads = 1024, most_phases = 64, most_fetches = 256, most_products = 64;
constexpr unsigned widest_line = 128;  // bytes that a swizzle goes over; there are halves and quarters of it

struct Phases {  // of a barrier in shared memory
    unsigned at;
    int count, pending;
    long long bytes;  // announced and not yet there
    int parity;       // of the phase that has not ended
    bool visible;     // to the copy engine
    char sync[2];
};

struct Map {  // as emulator.py packs a TensorMap
    uint64_t base;
    uint32_t itemsize, rank, im2col, tf32;
    uint32_t extent[4];
    uint64_t stride[3];
    uint32_t box[4], step[2];
    int32_t lower[2], upper[2];
};
static_assert(sizeof(Map) <= 128, "a map has 128 bytes");

UNWATCHED inline unsigned lines_of(const Map& map) { return map.box[1] * (map.im2col ? 1 : map.box[2]); }

struct Position {
    int at[4];
};
struct Moved {
    int w, h;
};

struct Fetch {
    Map map;
    unsigned to;
    Phases* phases;
    Position from;
    Moved offset;
};

struct Product {  // d (64 x columns) += a b, of operands described as the tensor cores want them
    float* sums;
    int columns;
    size_t itemsize;
    uint64_t a, b;
    bool a_across, b_across;
    float (*convert)(unsigned bits);
    bool held = false, fresh = false;  // a is in registers, as 16-bit values; what the sums were does not count
    unsigned registers[4] = {};
    unsigned group = 0;
};

struct Lane {  // what a thread has asked for, and what it waits for
    Product products[most_products];
    unsigned first, last, groups;  // of products: the oldest, the end; groups committed
    bool fenced;
    const Phases* phases;  // waited for, or null for products
    int parity;
    unsigned groups_left;
    char sync;
};

inline Phases phases[most_phases];
inline int phases_count;
inline Fetch fetches[most_fetches];
inline int fetches_count;
inline Lane lanes[most_threads];
inline char products_sync, fetches_sync;

UNWATCHED inline unsigned shared_offset(const void* pointer) {
    const char* p = static_cast<const char*>(pointer);
    if (p < arena || p >= arena + shared_bytes) fail("an address that is not in shared memory");
    return static_cast<unsigned>(p - arena);
}

// Pieces of sixteen bytes change places within a line, by which of eight lines of 128 bytes they lie in.
UNWATCHED inline unsigned swizzled(unsigned at, unsigned line) { return at ^ (at / widest_line % (line / 16) * 16); }

// ---- barriers

UNWATCHED inline void init_phases(const void* barrier, int count) {
    if (phases_count == most_phases) fail("more than %d barriers", most_phases);
    phases[phases_count++] = {shared_offset(barrier), count, count, 0, 0, false, {}};
}

UNWATCHED inline void show_phases() {
    for (int i = 0; i < phases_count; i++) phases[i].visible = true;
}

UNWATCHED inline Phases& phases_of(const void* barrier) {
    const unsigned at = shared_offset(barrier);
    for (int i = 0; i < phases_count; i++)
        if (phases[i].at == at) return phases[i];
    fail("the barrier at byte %u of shared memory is used before it is initialised", at);
    abort();
}

UNWATCHED inline void end_phase(Phases& of) {
    if (of.pending || of.bytes) return;
    of.parity ^= 1;
    of.pending = of.count;
}

UNWATCHED inline void arrive(const void* barrier, int bytes) {
    Phases& of = phases_of(barrier);
    if (!of.pending) fail("the barrier at byte %u of shared memory: more arrivals than it counts", of.at);
    tsan_release(&of.sync[of.parity]);
    of.bytes += bytes;
    of.pending--;
    end_phase(of);
}

UNWATCHED inline bool async_ready(const Fiber& fiber) {
    const Lane& lane = lanes[fiber.number];
    if (lane.phases) return lane.phases->parity != lane.parity;
    return lane.first == lane.last || lane.products[lane.first % most_products].group + lane.groups_left >= lane.groups;
}

UNWATCHED inline void await_async(const Phases* of, int parity, unsigned groups_left) {
    Lane& lane = lanes[current->number];
    lane.phases = of;
    lane.parity = parity;
    lane.groups_left = groups_left;
    if (async_ready(*current)) return;
    current->state = State::async;
    yield();
}

UNWATCHED inline void await_phase(const void* barrier, int parity) {
    Phases& of = phases_of(barrier);
    await_async(&of, parity, 0);
    tsan_acquire(&of.sync[parity]);
}

// ---- the copy engine

UNWATCHED inline void fetch(void* to, const void* map, const void* barrier, Position from, Moved offset, bool im2col) {
    Fetch& fresh = fetches[fetches_count];
    memcpy(&fresh.map, map, sizeof(Map));
    fresh.to = shared_offset(to);
    fresh.phases = &phases_of(barrier);
    fresh.from = from;
    fresh.offset = offset;
    const Map& m = fresh.map;
    const unsigned lines = lines_of(m), line = m.box[0] * m.itemsize;
    if (m.im2col != im2col) fail("the copy engine: a map of the other kind");
    if (m.base % 16) fail("the copy engine: the array begins at no multiple of 16 bytes");
    for (unsigned i = 0; i + 1 < m.rank; i++)
        if (m.stride[i] % 16) fail("the copy engine: a stride of %lu bytes", m.stride[i]);
    if (line != 128 && line != 64 && line != 32) fail("the copy engine: lines of %u values", m.box[0]);
    if (fresh.to % (8 * line))
        fail("the copy engine: a tile at byte %u of shared memory, not a multiple of %u", fresh.to, 8 * line);
    if (fresh.to + lines * line > shared_bytes) fail("the copy engine: a tile beyond shared memory");
    if (im2col && from.at[0] * static_cast<int>(m.itemsize) % 16)  // an H100: illegal instruction
        fail("the copy engine: pixels from channel %d on, at no multiple of 16 bytes", from.at[0]);
    if (offset.w < 0 || offset.w > 255 || offset.h < 0 || offset.h > 255) fail("the copy engine: an offset beyond 255");
    if (!fresh.phases->visible) fail("the copy engine: the barrier's initialisation was not fenced");
    if (fetches_count + 1 == most_fetches) fail("more than %d copies under way", most_fetches - 1);
    tsan_release(&fetches_sync);
    fetches_count++;
}

// Bytes of one value, or zeros outside; watched by the sanitizers, as what the engine itself does.
inline void bring(const Map& m, const int (&at)[4], unsigned to) {
    unsigned bits = 0;
    const char* from = reinterpret_cast<const char*>(m.base);
    bool inside = true;
    for (unsigned i = 0; i < m.rank; i++) {
        inside = inside && at[i] >= 0 && static_cast<uint32_t>(at[i]) < m.extent[i];
        from += at[i] * (i ? static_cast<int64_t>(m.stride[i - 1]) : static_cast<int64_t>(m.itemsize));
    }
    if (inside) memcpy(&bits, from, m.itemsize);
    if (m.tf32 && (bits & 0x7fffffffu) <= 0x7f800000u) bits = (bits + 0x1000u) & 0xffffe000u;
    memcpy(arena + swizzled(to, m.box[0] * m.itemsize), &bits, m.itemsize);
}

inline void fetch_now(const Fetch& what) {
    const Map& m = what.map;
    int c = what.from.at[0], w = what.from.at[1], h = what.from.at[2], n = what.from.at[3];
    const unsigned lines = lines_of(m);
    for (unsigned line = 0; line < lines; line++) {
        for (unsigned i = 0; i < m.box[0]; i++) {
            const unsigned to = what.to + (line * m.box[0] + i) * m.itemsize;
            const int channel = c + static_cast<int>(i), y = static_cast<int>(line % m.box[1]);
            if (m.im2col)
                bring(m, {channel, w + what.offset.w, h + what.offset.h, n}, to);
            else
                bring(m, {channel, w + y, h + static_cast<int>(line / m.box[1]), 0}, to);
        }
        if (!m.im2col) continue;
        // the first pixels lie in a box of each image; beyond its edge, the next line, beyond the last, the next image
        w += static_cast<int>(m.step[0]);
        if (w < static_cast<int>(m.extent[1]) + m.upper[0]) continue;
        w = m.lower[0];
        h += static_cast<int>(m.step[1]);
        if (h < static_cast<int>(m.extent[2]) + m.upper[1]) continue;
        h = m.lower[1];
        n++;
    }
}

// ---- matrix products

UNWATCHED inline void fence_products() { lanes[current->number].fenced = true; }

UNWATCHED inline void multiply_async(Product product) {
    Lane& lane = lanes[current->number];
    if (!lane.fenced) fail("a matrix product without a fence before its group");
    if (lane.last - lane.first == most_products) fail("more than %d matrix products under way", most_products);
    product.group = lane.groups;
    lane.products[lane.last++ % most_products] = product;
    tsan_release(&lane.sync);
}

UNWATCHED inline void commit_products() {
    lanes[current->number].groups++;
    lanes[current->number].fenced = false;
}

UNWATCHED inline void wait_products(unsigned pending) {
    await_async(nullptr, 0, pending);
    tsan_acquire(&products_sync);
}

// Bytes of a line, by what a matrix says of its swizzle: 1, 2 or 3.
UNWATCHED inline unsigned line_of(uint64_t matrix) { return 2 * widest_line >> (matrix >> 62); }

// Where the tensor cores look for a value: see matrix_at in hopper.cuh.
UNWATCHED inline unsigned place(uint64_t matrix, bool across, unsigned row, unsigned depth, unsigned itemsize) {
    const auto field = [&](int bit) UNWATCHED { return static_cast<unsigned>(matrix >> bit & 0x3fff) << 4; };
    const unsigned start = field(0), block = field(16), atom = field(32);
    const unsigned bytes = line_of(matrix), length = bytes / itemsize;
    const unsigned line = across ? depth : row, along = across ? row : depth;
    const unsigned from = start + line / 8 * atom + line % 8 * bytes;
    return swizzled(from + along / length * block + along % length * itemsize, bytes);
}

inline unsigned bits_at(unsigned at, size_t itemsize) {
    unsigned bits = 0;
    memcpy(&bits, arena + at, itemsize);
    return bits;
}

// Rows times columns; apart, so that it is fast in every build. As in `truncated_sum` of ptx.cuh, all terms of a sum
// are cut to the last place of the largest, and so is the sum, towards zero. In units of that place a term is below
// 2**24, and a sum of 17 fits an int.
UNWATCHED __attribute__((optimize("O3", "fp-contract=off"))) inline void multiply_now(
    const float* a, const float* b, float* sums, int depth, int columns) {
    constexpr uint64_t least = 1023 - 126;  // exponent, as a double has it
    for (int row = 0; row < 64; row++) {
        double largest[256], up[256], down[256];
        int32_t sum[256];
        float* out = sums + row * 256;
        for (int c = 0; c < columns; c++) largest[c] = out[c] < 0 ? -double(out[c]) : double(out[c]);
        bool finite = true;
        for (int k = 0; k < depth; k++) {
            const double factor = a[row * 16 + k];
            for (int c = 0; c < columns; c++) {
                const double term = factor * b[k * 256 + c], size = term < 0 ? -term : term;
                largest[c] = size > largest[c] ? size : largest[c];
                finite &= size - size == 0;
            }
        }
        for (int c = 0; c < columns; c++) finite &= out[c] - out[c] == 0;
        if (!finite) {
            for (int c = 0; c < columns; c++) {
                double plain = out[c];
                for (int k = 0; k < depth; k++) plain += double(a[row * 16 + k]) * b[k * 256 + c];
                out[c] = static_cast<float>(plain);
            }
            continue;
        }
        for (int c = 0; c < columns; c++) {
            uint64_t bits;
            memcpy(&bits, &largest[c], 8);
            const uint64_t exponent = bits >> 52 > least ? bits >> 52 : least;
            const uint64_t scale[] = {(2 * 1023 + 23 - exponent) << 52, (exponent - 23) << 52};
            memcpy(&up[c], &scale[0], 8);
            memcpy(&down[c], &scale[1], 8);
            sum[c] = static_cast<int32_t>(out[c] * up[c]);
        }
        for (int k = 0; k < depth; k++) {
            const double factor = a[row * 16 + k];
            for (int c = 0; c < columns; c++) sum[c] += static_cast<int32_t>(factor * b[k * 256 + c] * up[c]);
        }
        for (int c = 0; c < columns; c++) {
            double whole = sum[c];
            uint64_t bits;
            memcpy(&bits, &whole, 8);
            bits &= ~uint64_t(0) << 29;  // of 53 bits, the first 24 are left
            memcpy(&whole, &bits, 8);
            out[c] = static_cast<float>(whole * down[c]);
        }
    }
}

// The oldest product of a warpgroup: all its threads have asked for it.
inline void multiply_oldest(int first) {
    static float a[64 * 16], b[16 * 256], sums[64 * 256];
    const Product& p = lanes[first].products[lanes[first].first % most_products];
    const int depth = 32 / static_cast<int>(p.itemsize);
    const auto column = [&](int i, int thread) { return i / 4 * 8 + thread % 4 * 2 + i % 2; };
    const auto row = [&](int i, int thread) { return thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4; };
    for (int k = 0; k < depth; k++) {
        for (int r = 0; r < 64 && !p.held; r++)
            a[r * 16 + k] = p.convert(bits_at(place(p.a, p.a_across, r, k, p.itemsize), p.itemsize));
        for (int c = 0; c < p.columns; c++)
            b[k * 256 + c] = p.convert(bits_at(place(p.b, p.b_across, c, k, p.itemsize), p.itemsize));
    }
    for (int t = 0; t < warpgroup_size; t++) {
        const Product& mine = lanes[first + t].products[lanes[first + t].first % most_products];
        for (int i = 0; i < p.columns / 2; i++) sums[row(i, t) * 256 + column(i, t)] = p.fresh ? 0 : mine.sums[i];
        for (int i = 0; i < 8 && p.held; i++)
            a[row(i, t) * 16 + i / 4 * 8 + t % 4 * 2 + i % 2] = p.convert(mine.registers[i / 2] >> i % 2 * 16);
    }
    multiply_now(a, b, sums, depth, p.columns);
    for (int t = 0; t < warpgroup_size; t++) {
        float* mine = lanes[first + t].products[lanes[first + t].first % most_products].sums;
        for (int i = 0; i < p.columns / 2; i++) mine[i] = sums[row(i, t) * 256 + column(i, t)];
    }
}

// ---- when they happen: between the turns of the threads, in the scheduler's name, which knows of no thread's
// doings but what was handed over with a copy or a product

UNWATCHED inline bool same(const Product& x, const Product& y) {
    return x.columns == y.columns && x.a == y.a && x.b == y.b && x.group == y.group && x.convert == y.convert &&
           x.held == y.held && x.fresh == y.fresh;
}

UNWATCHED inline bool can_multiply(int first) {
    if (first + warpgroup_size > static_cast<int>(fibers.size())) return false;
    for (int t = first; t < first + warpgroup_size; t++)
        if (lanes[t].first == lanes[t].last) return false;
    const Product& p = lanes[first].products[lanes[first].first % most_products];
    for (int t = first; t < first + warpgroup_size; t++)
        if (!same(lanes[t].products[lanes[t].first % most_products], p))
            note("threads %d and %d of a warpgroup ask for different matrix products", first, t);
    for (uint64_t matrix : {p.held ? p.b : p.a, p.b})
        if (matrix >> 62 == 0 || matrix >> 49 & 7) note("a matrix that is not swizzled");
    return !message[0];
}

UNWATCHED inline void do_product(int first) {
    for (int t = first; t < first + warpgroup_size; t++) tsan_acquire(&lanes[t].sync);
    multiply_oldest(first);
    tsan_release(&products_sync);
    for (int t = first; t < first + warpgroup_size; t++) lanes[t].first++;
}

UNWATCHED inline void do_fetch(int number) {
    const Fetch what = fetches[number];
    fetches[number] = fetches[--fetches_count];
    tsan_acquire(&fetches_sync);
    fetch_now(what);
    tsan_release(&what.phases->sync[what.phases->parity]);
    what.phases->bytes -= static_cast<long long>(lines_of(what.map)) * what.map.box[0] * what.map.itemsize;
    end_phase(*what.phases);
}

// Some of what is under way, as the seed says; or, if it must, one thing. Whether anything happened.
UNWATCHED inline bool async_step(bool must) {
    bool any = false;
    if (must) {
        if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.state == State::done; }))
            return false;  // nobody is left to wait for it
        int able[most_threads / warpgroup_size], count = 0;
        for (int first = 0; first < static_cast<int>(fibers.size()); first += warpgroup_size)
            if (can_multiply(first)) able[count++] = first;
        if (!count && !fetches_count) return false;
        const int choice = static_cast<int>(random() % static_cast<unsigned>(count + fetches_count));
        if (choice < count)
            do_product(able[choice]);
        else
            do_fetch(choice - count);
        return true;
    }
    for (int i = fetches_count - 1; i >= 0; i--)
        if (chance()) do_fetch(i), any = true;
    for (int first = 0; first < static_cast<int>(fibers.size()); first += warpgroup_size)
        while (can_multiply(first) && chance()) do_product(first), any = true;
    return any;
}

UNWATCHED inline void async_begin() {
    phases_count = fetches_count = 0;
    for (size_t i = 0; i < fibers.size() && i < most_threads; i++) {
        lanes[i].first = lanes[i].last = lanes[i].groups = 0;
        lanes[i].fenced = false;
    }
}

UNWATCHED inline void async_end() {
    if (fetches_count) note("the block ended with %d copies of the copy engine under way", fetches_count);
    for (int i = 0; i < phases_count; i++)
        if (phases[i].bytes) note("the block ended with %lld bytes awaited at a barrier", phases[i].bytes);
    for (size_t i = 0; i < fibers.size() && i < most_threads; i++)
        if (lanes[i].first != lanes[i].last) note("a thread returned before its matrix products were done");
}

}  // namespace simt
