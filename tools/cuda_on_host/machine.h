// A block of CUDA threads as fibers that take turns on one thread of the host. What a kernel sees
// of it is in device.h; the memory that it may touch is watched by memory.cpp.
//
// A thread runs until it waits: for its block (__syncthreads) or for lanes of its warp (shuffles).
// What the hardware would forgive, hang on or get wrong at times is an error here: lanes that a
// mask names and that do not come, barriers that only a part of a block reaches, blocks and grids
// over the limits. The order of threads and of blocks may be turned round or drawn: results that
// depend on it show. One thread of the host launches; there is one machine.
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

namespace cuda_on_host {

using Place = std::source_location;

// Of the thread that runs. The same for the whole of a kernel.
[[gnu::const]] uint3 thread_index();
[[gnu::const]] uint3 block_index();
[[gnu::const]] dim3 block_size();
[[gnu::const]] dim3 grid_size();
[[gnu::const]] unsigned lane();

// __syncthreads.
void meet_block(Place place);
// A shuffle among the lanes of `mask`: gives the value of lane `source`.
uint64_t exchange(unsigned mask, uint64_t value, unsigned source, Place place);

// Runs `kernel(call)` for every thread; `call`, of `size` bytes, may be read by all.
cudaError_t launch(const cudaLaunchConfig_t& config, void (*kernel)(const void*), const void* call,
                   size_t size);

// What was wrong with the last launch that failed.
const std::string& finding();

// ------------------------------------------------------------------ between machine and memory

// The thread that runs, as the watch on memory knows it.
struct Running {
  bool any;  // false: host code
  unsigned thread;
  uintptr_t stack;
  size_t stack_size;
};
Running running();

// Gives up the launch; called on a fiber.
[[noreturn]] void fail(const std::string& what);

// Dynamic shared memory counts `shared` bytes; `call` may be read.
void watch_launch(const void* call, size_t size, size_t shared);
void watch_block();
void watch_barrier();

// A load or store that the kernel is about to make; `code` is where.
void touch(uintptr_t at, size_t size, bool writes, const void* code);
// The file and line of the source that an address of code belongs to.
std::string line_of(const void* code);

// Memory that kernels may use: tensors.
void add_memory(const void* begin, size_t size);
void remove_memory(const void* begin);

}  // namespace cuda_on_host
