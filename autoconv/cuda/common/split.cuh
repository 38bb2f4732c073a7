// Split-K: a product's depth in SPLIT parts, a block to each. A block leaves its sums in memory and takes a ticket of
// its tile; the one that takes the last ticket adds the parts, always in the same order, and nobody waits. Where there
// are more than FAN_IN parts, each FAN_IN of them are added first, and then their sums.
#pragma once
#include "tickets.cuh"

constexpr int SPLIT_GROUPS = ceil_div(SPLIT, FAN_IN);
constexpr int TICKETS = SPLIT_GROUPS > 1 ? SPLIT_GROUPS + 1 : 1;  // of a tile: of each group, and of the groups

// What a block has of a grid in whose third dimension lie groups, and in each group the parts of the depth. It is found
// where it is asked for, and takes no registers meanwhile.
struct Share {
    int group, part;
};
DEVICE Share share() {
    const int z = block_z_again();
    if constexpr (GROUPS == 1) return {0, z};
    return {z / SPLIT, z % SPLIT};
}

// Those who have a tile's sums together, COUNT each: so many threads, which share a barrier; and where sums wait, in
// the order of the threads, so that neighbours travel at once and lie together.
template <int COUNT, int THREADS_TOGETHER>
struct Team {
    static constexpr int WIDE = 16 / sizeof(Acc), RUN = COUNT % WIDE == 0 ? WIDE : 1;
    static constexpr int AT_ONCE = COUNT > 32 ? 1 : COUNT > 16 ? 2 : 4;  // parts on their way, as registers allow
    struct alignas(RUN * sizeof(Acc)) Values {
        Acc value[RUN];
    };
    int thread, barrier;
    Acc* parts;  // of the tile
    unsigned* tickets;

    DEVICE Values* place(int part, int i) const {
        return reinterpret_cast<Values*>(parts) + (part * (COUNT / RUN) + i) * THREADS_TOGETHER + thread;
    }

    // To where this thread may find them again.
    DEVICE void keep(const Acc (&sum)[COUNT], int part) const {
#pragma unroll
        for (int i = 0; i < COUNT / RUN; i++) *place(part, i) = values(sum, i);
    }
    // To where any block may find them, once a ticket says so.
    DEVICE void leave(const Acc (&sum)[COUNT], int part) const {
#pragma unroll
        for (int i = 0; i < COUNT / RUN; i++) publish(place(part, i), values(sum, i));
    }
    DEVICE static Values values(const Acc (&sum)[COUNT], int i) {
        Values values;
#pragma unroll
        for (int e = 0; e < RUN; e++) values.value[e] = sum[i * RUN + e];
        return values;
    }
    DEVICE void add(Acc (&sum)[COUNT], int part) const {
#pragma unroll
        for (int i = 0; i < COUNT / RUN; i++) {
            const Values more = *place(part, i);
#pragma unroll
            for (int e = 0; e < RUN; e++) sum[i * RUN + e] += more.value[e];
        }
    }
    // Of so many parts, each so far from the one before.
    DEVICE void add_all(Acc (&sum)[COUNT], int first, int count, int step) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) sum[i] = 0;
#pragma unroll AT_ONCE
        for (int i = 0; i < count; i++) add(sum, first + i * step);
    }

    // Whether all of so many have left their sums, this team the last. One thread's fences are for all: what the others
    // did before the barrier, it knows of, and what it learns, they know of behind the other one.
    DEVICE bool last_of(int count, unsigned* ticket) const {
        sync_some<THREADS_TOGETHER>(barrier);
        bool last = false;
        if (thread == 0) {
            fence_device();
            last = take_ticket(ticket, count - 1) == unsigned(count - 1);
            fence_device();
        }
        return any_of<THREADS_TOGETHER>(barrier, last);
    }

    // Makes of a part's sums those of the whole depth, for one of the teams that have parts of this tile: whether it is
    // this one.
    DEVICE bool complete(Acc (&sum)[COUNT], int part) const {
        if constexpr (SPLIT == 1) return true;
        const int group = part / FAN_IN, first = group * FAN_IN;
        const int count = SPLIT - first < FAN_IN ? SPLIT - first : FAN_IN;
        leave(sum, part);
        if (!last_of(count, tickets + group)) return false;
        add_all(sum, first, count, 1);
        if constexpr (SPLIT_GROUPS > 1) {
            leave(sum, first);  // in the place of a part that nobody wants any more
            if (!last_of(SPLIT_GROUPS, tickets + SPLIT_GROUPS)) return false;
            add_all(sum, 0, SPLIT_GROUPS, FAN_IN);
        }
        return true;
    }
};

// Sums in the order in which they lie.
template <int COUNT, class Sums>
DEVICE Acc (&flat(Sums& sums))[COUNT] {
    static_assert(sizeof(Sums) == COUNT * sizeof(Acc), "all of them");
    return reinterpret_cast<Acc(&)[COUNT]>(sums);
}
