// How a grid runs, and with it most of the emulator: compiled once, and linked to every kernel.
#include "replay.h"

namespace simt {

const char* run_grid(const unsigned* grid, const unsigned* block, size_t shared, unsigned schedule) {
    const int eager[] = {0, 10, 50, 100};
    random.seed(schedule);
    eagerness = eager[schedule / 4 % 4];
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    shared_limit = shared;
#ifdef __SANITIZE_THREAD__
    scheduler_tsan = __tsan_get_current_fiber();
#endif
    for (size_t i = block[0] * block[1] * block[2]; i < fibers.size(); i++) free(fibers[i].stack);
    fibers.resize(block[0] * block[1] * block[2]);
    for (size_t i = 0; i < fibers.size(); i++) prepare(fibers[i], static_cast<int>(i));
    const uint64_t blocks = uint64_t{grid[0]} * grid[1] * grid[2];
    std::vector<uint64_t> order(blocks);
    for (uint64_t i = 0; i < blocks; i++) order[i] = schedule % 2 ? blocks - 1 - i : i;
    if (schedule % 4 > 1) std::shuffle(order.begin(), order.end(), random);
    stores_count = tickets_count = 0;
    for (uint64_t i = 0; i < blocks && !message[0]; i++) {
        const uint64_t b = order[i];
        block_index = {static_cast<unsigned>(b % grid[0]), static_cast<unsigned>(b / grid[0] % grid[1]),
                       static_cast<unsigned>(b / grid[0] / grid[1])};
        run_block(schedule);
        remember_late();
    }
    land_stores(-1);
    for (const Late& byte : late) *byte.to = byte.value;
    late.clear();
    for (int i = 0; i < tickets_count; i++)
        if (*tickets[i]) note("a ticket is left at %u, and the next launch wants it at 0", *tickets[i]);
#ifdef __SANITIZE_THREAD__
    for (Fiber& fiber : fibers) __tsan_destroy_fiber(fiber.tsan);
#endif
    return message[0] ? message : nullptr;
}

}  // namespace simt
