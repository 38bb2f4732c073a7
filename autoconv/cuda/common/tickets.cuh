// What blocks need to tell each other, in PTX and in C++ for the emulator of the tests: where they are, barriers of some
// threads, fences, and tickets.
#pragma once
#include "common.cuh"

#ifndef SIMT
// Where a thread or a block is, read anew: what was read before, the compiler may forget meanwhile.
DEVICE int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
DEVICE int block_x_again() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}
DEVICE int block_z_again() {
    int z;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(z));
    return z;
}

// A barrier of so many threads, in whole warps, by its number: 0 is that of `__syncthreads`. And one that tells whether
// any of them says so.
template <int threads>
DEVICE void sync_some(int barrier) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}
template <int threads>
DEVICE bool any_of(int barrier, bool mine) {
    int any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.s32 mine, %1, 0;\n"
        "barrier.red.or.pred any, %2, %3, mine;\nselp.s32 %0, 1, 0, any;\n}"
        : "=r"(any) : "r"(static_cast<int>(mine)), "r"(barrier), "n"(threads) : "memory");
    return any;
}

// A value in global memory for other blocks, who may look for it when a ticket that is taken behind a fence says so.
template <class Value>
DEVICE void publish(Value* to, Value value) {
    *to = value;
}
// In the memory of the whole GPU, what this thread knows of comes before what it does next (PTX ISA, "Memory Consistency
// Model": with the tickets between them, two fences synchronise).
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// The next number from 0 to `last`, after which 0 comes again.
DEVICE unsigned take_ticket(unsigned* ticket, unsigned last) {
    unsigned number;
    asm volatile("atom.relaxed.gpu.inc.u32 %0, [%1], %2;" : "=r"(number) : "l"(ticket), "r"(last) : "memory");
    return number;
}

#else  // the emulator
DEVICE int thread_again() { return static_cast<int>(threadIdx.x); }
DEVICE int block_x_again() { return static_cast<int>(blockIdx.x); }
DEVICE int block_z_again() { return static_cast<int>(blockIdx.z); }
template <int threads>
DEVICE void sync_some(int barrier) {
    simt::meet(barrier, threads, false);
}
template <int threads>
DEVICE bool any_of(int barrier, bool mine) {
    return simt::meet(barrier, threads, mine);
}
template <class Value>
DEVICE void publish(Value* to, Value value) {
    simt::check_aligned(to, alignof(Value), "wide store");
    simt::publish(to, &value, sizeof value);
}
DEVICE void fence_device() { simt::fence_device(); }
DEVICE unsigned take_ticket(unsigned* ticket, unsigned last) { return simt::take_ticket(ticket, last); }
#endif
