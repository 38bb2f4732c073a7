// A CUDA block on a CPU: one fiber per thread, seeded schedules, asynchronous copies that land when
// the seed says so. Kernels are compiled unchanged behind this header; ptx.cuh holds the instructions.
//
// Kernel arguments live in the launch, shared memory in an arena, and nothing that outlives an
// instruction may point into a fiber's stack: a thread may be gone when its copy lands.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef __x86_64__
#error "the emulator switches between fibers in x86-64 assembly"
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define UNWATCHED __attribute__((no_sanitize("thread")))
#else
#define UNWATCHED
#endif

#define SIMT 1
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __syncthreads() simt::barrier(__LINE__)
#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index)
#define gridDim (simt::grid_size)
#define SHARED(type, name) type& name = *static_cast<type*>(simt::shared_memory(sizeof(type), alignof(type)))
#define SHARED_DYNAMIC SHARED

namespace simt {

constexpr size_t stack_bytes = 128 << 10;
constexpr size_t arena_bytes = 232 << 10;  // more than any architecture's shared memory, and a canary
constexpr size_t canary_bytes = 4 << 10;
constexpr int warp_size = 32;

struct Index {
    unsigned x, y, z;
};

enum class State { run, barrier, warp, meeting, async, done };

struct Copy {  // an asynchronous copy of 4, 8 or 16 bytes; without a source, of zeros
    void* to;
    const void* from;
    int bytes;
    bool landed;
};

struct Fiber {
    void* stack_pointer;
    char* stack;
    Index thread;
    int number;
    State state;
    int line;         // where it waits
    const void* site; // which collective it waits in
    void* operand;
    std::vector<Copy> open;                // copies not yet committed to a group
    std::deque<std::vector<Copy>> groups;  // the oldest first
    bool fenced;      // what it knows of is in the GPU's memory, and what it learnt from tickets is there for it
    bool ticketed;    // since the last fence
    void* asan;
    void* tsan;
};

struct Array {
    const char *begin, *end;
};

struct Store {  // for other blocks, not yet in the GPU's memory
    char* to;
    char from[16];
    int bytes;
    int thread;  // of the block that runs, or none
    bool known;  // to other threads of the block, by a barrier
};
constexpr int most_stores = 1 << 16, most_tickets = 1 << 14;

struct Late {  // a byte that a block wrote when it had a ticket that was not the last
    char* to;
    char value;
};

struct Meeting {  // a barrier of some threads
    int waiting;
    bool any, result;
    char sync[2];
    unsigned round;
};
constexpr int most_meetings = 16;  // of a block, in hardware

inline std::vector<Fiber> fibers;
inline std::vector<Array> arrays;  // that the kernel was given
inline Store stores[most_stores];
inline const unsigned* tickets[most_tickets];  // that were taken
inline int stores_count, tickets_count;
inline std::vector<std::vector<char>> before;  // the arrays when the block took a ticket that was not the last, if it did
inline std::vector<Late> late;
inline Meeting meetings[most_meetings];
inline Fiber* current;
inline void* scheduler;
inline Index block_index, block_size, grid_size;
alignas(1024) inline char arena[arena_bytes];
inline size_t shared_bytes, shared_limit;
inline char message[400];
inline std::mt19937 random;
inline int eagerness;  // chance in a hundred that a pending copy lands at an opportunity
inline void (*entry)();
inline void* scheduler_asan;
inline const void* scheduler_stack;
inline size_t scheduler_stack_bytes;
inline void* scheduler_tsan;
inline char start_sync, end_sync, barrier_sync[2], warp_sync[32];
inline unsigned phase;

extern "C" void simt_switch(void** save, void* to);
asm(R"(
.pushsection .text
.weak simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
.popsection
)");

UNWATCHED inline const Index& thread_index() { return current->thread; }

// What works behind the threads' backs: see async.h.
void async_begin();
void async_end();
bool async_step(bool must);
bool async_ready(const Fiber& fiber);

// Back to the scheduler, until it chooses this fiber again.
UNWATCHED inline void yield() {
    Fiber* self = current;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&self->asan, scheduler_stack, scheduler_stack_bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
    simt_switch(&self->stack_pointer, scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(self->asan, nullptr, nullptr);
#endif
}

UNWATCHED inline void resume(Fiber& fiber) {
    current = &fiber;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_asan, fiber.stack, stack_bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    simt_switch(&scheduler, fiber.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler_asan, nullptr, nullptr);
#endif
}

// The first error ends the launch; the fibers are dropped where they stand.
UNWATCHED inline void note(const char* format, ...) {
    if (message[0]) return;
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
}

template <class... Values>
UNWATCHED inline void fail(const char* format, Values... values) {
    note(format, values...);
    yield();
    abort();
}

inline void tsan_acquire([[maybe_unused]] void* object) {
#ifdef __SANITIZE_THREAD__
    __tsan_acquire(object);
#endif
}

inline void tsan_release([[maybe_unused]] void* object) {
#ifdef __SANITIZE_THREAD__
    __tsan_release(object);
#endif
}

UNWATCHED inline void first_frame() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    for (;;) {  // a thread of each block: to make fibers is slow, under sanitizers above all
        tsan_acquire(&start_sync);
        entry();
        tsan_release(&end_sync);
        current->state = State::done;
        yield();
    }
}

UNWATCHED inline void barrier(int line) {
    current->state = State::barrier;
    current->line = line;
    char* object = &barrier_sync[phase & 1];
    tsan_release(object);
    yield();
    tsan_acquire(object);
}

// Lanes deposit their operands; the last one to arrive computes for the whole warp.
using Collective = void (*)(void** lanes);
UNWATCHED inline void collective(int line, void* operand, Collective compute) {
    Fiber* self = current;
    if (fibers.size() % warp_size) fail("line %d: a warp instruction in a block of %zu threads", line, fibers.size());
    Fiber* warp = &fibers[self->number / warp_size * warp_size];
    self->operand = operand;
    self->site = reinterpret_cast<const void*>(compute);
    self->line = line;
    self->state = State::warp;
    for (int lane = 0; lane < warp_size; lane++)
        if (warp[lane].state != State::warp || warp[lane].site != self->site) return yield();
    void* lanes[warp_size];
    for (int lane = 0; lane < warp_size; lane++) {
        lanes[lane] = warp[lane].operand;
        warp[lane].state = State::run;
    }
    compute(lanes);
}

// A collective that computes nothing, but orders memory.
UNWATCHED inline void warp_barrier(int line) {
    char* object = &warp_sync[current->number / warp_size];
    tsan_release(object);
    collective(line, object, [](void**) UNWATCHED {});
    tsan_acquire(object);
}

UNWATCHED inline void* shared_memory(size_t bytes, size_t alignment) {
    if (bytes + canary_bytes > arena_bytes || bytes > shared_limit)
        fail("shared memory: %zu bytes asked for, %zu allowed", bytes, shared_limit);
    if (alignment > 1024) fail("shared memory: alignment %zu", alignment);
    if (shared_bytes && shared_bytes != bytes) fail("shared memory: two layouts in one kernel");
    shared_bytes = bytes;
    return arena;
}

UNWATCHED inline bool chance() { return static_cast<int>(random() % 100) < eagerness; }

inline void check_aligned(const void* pointer, size_t bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes) fail("%s: address not a multiple of %zu", what, bytes);
}

struct Texture {  // as emulator.py packs one
    uint64_t base;
    uint32_t itemsize, width, height;
};

// An element of a texture, to the first bytes of `to`; beyond the borders nothing.
inline void texel(void* to, const void* texture, int x, int y) {
    const Texture& seen = *static_cast<const Texture*>(texture);
    if (seen.base % 512) fail("a texture whose array does not begin on a multiple of 512 bytes");
    if (seen.width * seen.itemsize % 32) fail("a texture with lines of %u bytes", seen.width * seen.itemsize);
    if (std::abs(x) >= 1 << 23 || std::abs(y) >= 1 << 23) fail("a texture's coordinates (%d, %d)", x, y);
    if (x < 0 || y < 0 || x >= static_cast<int>(seen.width) || y >= static_cast<int>(seen.height)) return;
    const char* line = reinterpret_cast<const char*>(seen.base) + size_t(y) * seen.width * seen.itemsize;
    memcpy(to, line + size_t(x) * seen.itemsize, seen.itemsize);
}

// Whether so many bytes all lie in one of the arrays that the kernel was given.
UNWATCHED inline bool in_an_array(const void* pointer, int bytes) {
    const char* const from = static_cast<const char*>(pointer);
    return std::any_of(arrays.begin(), arrays.end(), [&](const Array& array) UNWATCHED {
        return from >= array.begin && from <= array.end - bytes;
    });
}

inline void land(Copy& copy) {
    if (copy.landed) return;
    copy.landed = true;
    if (copy.from)
        memcpy(copy.to, copy.from, copy.bytes);
    else
        memset(copy.to, 0, copy.bytes);
}

inline void copy_async(void* to, const void* from, int bytes, bool wanted) {
    check_aligned(to, bytes, "cp.async to shared memory");
    check_aligned(from, bytes, "cp.async from global memory");
    // Four bytes that are not wanted are an ignored source, at any address; sixteen are a source of no bytes, whose address
    // has to be one.
    if (wanted && !in_an_array(from, bytes)) fail("cp.async: reads outside every array");
    if (!wanted && bytes > 4 && !in_an_array(from, 1)) fail("cp.async: an address outside every array, wanted or not");
    if (static_cast<char*>(to) < arena || static_cast<char*>(to) + bytes > arena + shared_bytes)
        fail("cp.async: the target is not in shared memory");
    current->open.push_back({to, wanted ? from : nullptr, bytes, false});
#ifndef __SANITIZE_THREAD__  // a copy belongs to the thread that waits for it; only there can TSan place it
    if (chance()) land(current->open.back());
#endif
}

inline void commit_copies() { current->groups.push_back(std::exchange(current->open, {})); }

inline void wait_copies(size_t pending) {
    while (current->groups.size() > pending) {
        for (Copy& copy : current->groups.front()) land(copy);
        current->groups.pop_front();
    }
}

#ifndef __SANITIZE_THREAD__
inline void land_some() {
    for (Fiber& fiber : fibers)
        for (auto& group : fiber.groups)
            for (Copy& copy : group)
                if (chance()) land(copy);
}
#endif

// ---- between blocks. They run one after the other, in an order that the seed says; but what one stores for others
// comes to the GPU's memory only by a fence of a thread that knows of it, by chance, or when the kernel has ended.

UNWATCHED inline void land(const Store& store) { memcpy(store.to, store.from, store.bytes); }

UNWATCHED inline void publish(void* to, const void* from, int bytes) {
    if (!in_an_array(to, bytes)) fail("a store outside every array");
    if (stores_count == most_stores) fail("more than %d stores for other blocks", most_stores);
    Store& store = stores[stores_count++];
    store = {static_cast<char*>(to), {}, bytes, current->number, false};
    volatile char* kept = store.from;  // no call of memcpy, which a sanitizer watches whoever calls it
    for (int i = 0; i < bytes; i++) kept[i] = static_cast<const char*>(from)[i];
#ifndef __SANITIZE_THREAD__
    if (chance()) land(store);
#endif
}

// Those that are known to a thread, or, of thread -1, all.
UNWATCHED inline void land_stores(int thread) {
    int left = 0;
    for (int i = 0; i < stores_count; i++) {
        if (thread < 0 || stores[i].known || stores[i].thread == thread)
            land(stores[i]);
        else
            stores[left++] = stores[i];
    }
    stores_count = left;
}

UNWATCHED inline void fence_device() {
    land_stores(current->number);
    current->fenced = true;
    current->ticketed = false;
}

UNWATCHED inline unsigned take_ticket(unsigned* ticket, unsigned last) {
    if (!in_an_array(ticket, sizeof *ticket)) fail("a ticket outside every array");
    if (!current->fenced) fail("a ticket is taken, and no fence is before it");
    if (tickets_count == most_tickets) fail("more than %d tickets", most_tickets);
    current->fenced = false;
    current->ticketed = true;
    tickets[tickets_count++] = ticket;
    const unsigned number = *ticket;
    *ticket = number >= last ? 0 : number + 1;
#ifndef __SANITIZE_THREAD__
    if (number < last && before.empty())
        for (const Array& array : arrays) before.emplace_back(array.begin, array.end);
#endif
    return number;
}

// What a block still writes then may come after all that others do: it is written again when the kernel has ended.
UNWATCHED inline void remember_late() {
    const auto is_ticket = [](const char* place) {
        return std::any_of(tickets, tickets + tickets_count, [&](const unsigned* ticket) {
            const char* const first = reinterpret_cast<const char*>(ticket);
            return place >= first && place < first + sizeof *ticket;
        });
    };
    for (size_t i = 0; i < before.size(); i++)
        for (size_t at = 0; at < before[i].size(); at++) {
            char* const place = const_cast<char*>(arrays[i].begin) + at;
            if (*place != before[i][at] && !is_ticket(place)) late.push_back({place, *place});
        }
    before.clear();
}

// A barrier of `count` threads, and whether any of them brings true.
UNWATCHED inline bool meet(int barrier, int count, bool mine) {
    if (barrier < 0 || barrier >= most_meetings || count % warp_size) fail("barrier %d of %d threads", barrier, count);
    if (current->ticketed) fail("a ticket was taken, and no fence is behind it");
    current->fenced = false;  // it learns of what the others have stored
    Meeting& here = meetings[barrier];
    char* const object = &here.sync[here.round & 1];
    tsan_release(object);
    here.any |= mine;
    current->site = &here;
    current->line = barrier;
    current->state = State::meeting;
    if (++here.waiting < count) {
        yield();
    } else {
        const auto meets = [&](const Fiber& fiber) UNWATCHED {
            return fiber.state == State::meeting && fiber.site == &here;
        };
        for (int i = 0; i < stores_count; i++)
            stores[i].known |= stores[i].thread >= 0 && meets(fibers[stores[i].thread]);
        for (Fiber& fiber : fibers)
            if (meets(fiber)) fiber.state = State::run;
        here.result = here.any;
        here.any = false;
        here.waiting = 0;
        here.round++;
    }
    tsan_acquire(object);
    return here.result;
}

UNWATCHED inline void prepare(Fiber& fiber, int number) {
    fiber.number = number;
    fiber.thread = {number % block_size.x, number / block_size.x % block_size.y,
                    number / (block_size.x * block_size.y)};
    fiber.open.clear();
    fiber.groups.clear();
    fiber.fenced = fiber.ticketed = false;
    fiber.asan = nullptr;
    if (!fiber.stack) fiber.stack = static_cast<char*>(std::aligned_alloc(4096, stack_bytes));
#ifdef __SANITIZE_THREAD__
    fiber.tsan = __tsan_create_fiber(0);
#endif
    void** top = reinterpret_cast<void**>(fiber.stack + stack_bytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(first_frame);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.stack_pointer = top;
}

// All fibers wait: either all at one barrier, which opens, or the kernel is wrong.
UNWATCHED inline bool open_barrier() {
    size_t done = 0, waiting = 0;
    int line = 0, other = 0;
    for (Fiber& fiber : fibers) {
        done += fiber.state == State::done;
        if (fiber.state == State::warp) note("line %d: a warp's threads do not meet", fiber.line);
        if (fiber.state == State::meeting) note("barrier %d: not all of its threads meet", fiber.line);
        if (fiber.state == State::async) note("thread %d waits for what nothing will bring about", fiber.number);
        if (fiber.state != State::barrier) continue;
        waiting++;
        (line == 0 || line == fiber.line ? line : other) = fiber.line;
    }
    if (done == fibers.size()) return false;
    if (other) note("threads wait at two barriers, lines %d and %d", line, other);
    if (done) note("line %d: %zu threads wait at a barrier, %zu have returned", line, waiting, done);
    phase++;
    for (int i = 0; i < stores_count; i++) stores[i].known |= stores[i].thread >= 0;
    for (Fiber& fiber : fibers) fiber.state = State::run, fiber.fenced = false;
    return true;
}

UNWATCHED inline void run_block(unsigned seed) {
    std::vector<int> order(fibers.size());
    shared_bytes = 0;
    std::fill_n(arena, std::min(shared_limit + canary_bytes, arena_bytes), '\xff');
    for (Meeting& meeting : meetings) meeting.waiting = 0, meeting.any = false;
    for (size_t i = 0; i < order.size(); i++) fibers[order[i] = static_cast<int>(i)].state = State::run;
    if (seed % 4 == 1) std::reverse(order.begin(), order.end());
    unsigned asleep = 0;  // a bit to each warp: in every fourth schedule some stay behind for a while
    async_begin();
    tsan_release(&start_sync);
    do {
        for (bool ran = true; ran && !message[0];) {
            ran = false;
            if (seed % 4 > 1) std::shuffle(order.begin(), order.end(), random);
            if (seed % 4 == 3 && random() % 4 == 0) asleep = static_cast<unsigned>(random());
            for (int number : order) {
                Fiber& fiber = fibers[number];
                if (fiber.state == State::async && async_ready(fiber)) fiber.state = State::run;
                if (fiber.state == State::run && asleep >> number / warp_size & 1) {
                    ran = true;  // soon
                    continue;
                }
                while (fiber.state == State::run && !message[0]) {
                    resume(fiber);
                    ran = true;
                }
            }
            ran |= async_step(false);
#ifndef __SANITIZE_THREAD__
            land_some();
#endif
        }
    } while (!message[0] && (async_step(true) || open_barrier()));
    async_end();
    tsan_acquire(&end_sync);
    for (int i = 0; i < stores_count; i++) stores[i].thread = -1, stores[i].known = false;
    for (Fiber& fiber : fibers) {
        for (auto& group : fiber.groups)
            for (Copy& copy : group)
                if (!copy.landed) note("a thread returned before its copies had landed");
        if (!fiber.open.empty()) note("a thread returned with copies in no group");
        fiber.groups.clear();
    }
    const char* end = arena + shared_bytes;
    if (std::any_of(end, end + canary_bytes, [](char byte) { return byte != '\xff'; }))
        note("shared memory: written beyond its %zu bytes", shared_bytes);
}

template <class Argument>
decltype(auto) argument(void* pointer) {
    return static_cast<Argument>(*static_cast<std::remove_reference_t<Argument>*>(pointer));
}

template <auto kernel>
struct Call;

template <class... Arguments, void (*kernel)(Arguments...)>
struct Call<kernel> {
    static constexpr int count = sizeof...(Arguments);
    static inline void** values;

    template <size_t... i>
    static void apply(std::index_sequence<i...>) {
        kernel(argument<Arguments>(values[i])...);
    }
    static void enter() { apply(std::index_sequence_for<Arguments...>{}); }
};

// Runs `entry` on a grid: see grid.cpp.
const char* run_grid(const unsigned* grid, const unsigned* block, size_t shared, unsigned schedule);

// Runs a kernel on a grid; returns null, or what went wrong. `sizes` are bytes of the arrays that the arguments are, or
// begin with the addresses of; `schedule` seeds every random choice.
template <auto kernel>
const char* launch(const unsigned* grid, const unsigned* block, size_t shared, void** arguments, const int64_t* sizes,
                   int count, unsigned schedule) {
    message[0] = 0;
    if (count != Call<kernel>::count) {
        note("%d arguments given, the kernel takes %d", count, Call<kernel>::count);
        return message;
    }
    arrays.clear();
    for (int i = 0; i < count; i++) {
        const char* const begin = *static_cast<const char**>(arguments[i]);
        if (begin) arrays.push_back({begin, begin + sizes[i]});
    }
    Call<kernel>::values = arguments;
    entry = Call<kernel>::enter;
    return run_grid(grid, block, shared, schedule);
}

}  // namespace simt
