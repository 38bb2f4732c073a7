// A launch read from a file and its arrays written back: how the sanitizers, which need a process of their
// own, see the same launches as the tests. Arrays are allocated to the byte, so that ASan fences them.
#pragma once

#include "async.h"

template <auto kernel>
int replay(const char* path) {
    std::FILE* file = std::fopen(path, "r+b");
    struct Header {
        unsigned grid[3], block[3], schedule, count;
        uint64_t shared;
    } header;
    if (!file || std::fread(&header, sizeof header, 1, file) != 1) return 2;
    std::vector<void*> arrays(header.count);
    std::vector<int64_t> sizes(header.count);  // -1 for a null pointer
    if (std::fread(sizes.data(), 8, sizes.size(), file) != sizes.size()) return 2;
    struct alignas(64) TensorMap {
        uint64_t word[16];
    };
    std::vector<TensorMap> maps(header.count);  // of zeros, where the kernel takes the array itself
    if (std::fread(maps.data(), sizeof(TensorMap), maps.size(), file) != maps.size()) return 2;
    const long start = std::ftell(file);
    for (size_t i = 0; i < arrays.size(); i++) {
        if (sizes[i] < 0) continue;
        const size_t bytes = static_cast<size_t>(sizes[i]);
        if (posix_memalign(&arrays[i], 512, bytes) || std::fread(arrays[i], 1, bytes, file) != bytes) return 2;
    }
    std::vector<void*> arguments;
    for (size_t i = 0; i < arrays.size(); i++) {
        arguments.push_back(maps[i].word[1] ? static_cast<void*>(&maps[i]) : &arrays[i]);
        maps[i].word[0] = reinterpret_cast<uint64_t>(arrays[i]);
    }
    const char* error = simt::launch<kernel>(header.grid, header.block, header.shared, arguments.data(),
                                             sizes.data(), static_cast<int>(header.count), header.schedule);
    if (error) {
        std::fprintf(stderr, "%s\n", error);
        return 3;
    }
    std::fseek(file, start, SEEK_SET);
    for (size_t i = 0; i < arrays.size(); i++) {
        if (sizes[i] >= 0) std::fwrite(arrays[i], 1, static_cast<size_t>(sizes[i]), file);
        free(arrays[i]);
    }
    return std::fclose(file);
}
