// The machine for callers in C: tools/ptx_machine/__init__.py.
#include <algorithm>
#include <cstdio>

#include "machine.h"

namespace {

int told(const std::exception& error, char* message, int size) {
  std::snprintf(message, static_cast<size_t>(size), "%s", error.what());
  return 1;
}

}  // namespace

extern "C" {

// Returns a program, or nullptr with the reason in `message`.
void* ptx_parse(const char* text, char* message, int size) {
  try {
    return new ptx::Program(ptx::parse(text));
  } catch (const std::exception& error) {
    told(error, message, size);
    return nullptr;
  }
}

void ptx_free(void* program) {
  delete static_cast<ptx::Program*>(program);
}

int ptx_num_parameters(const void* program) {
  return static_cast<int>(static_cast<const ptx::Program*>(program)->parameters.size());
}

// Bytes and offset of a parameter.
void ptx_parameter(const void* program, int index, int* bytes, int* offset) {
  const auto& parameter = static_cast<const ptx::Program*>(program)->parameters.at(index);
  *bytes = parameter.bytes;
  *offset = parameter.offset;
}

// Writes the lines of the PTX that were executed, up to `most` of them, and returns their number.
int ptx_executed_lines(const void* program, int* lines, int most) {
  int count = 0;
  for (const auto& each : static_cast<const ptx::Program*>(program)->code)
    if (each.executed && count < most) lines[count++] = each.line;
  return count;
}

// Runs all blocks; returns 0, or 1 with what went wrong in `message`.
int ptx_run(const void* program, const int* grid, const int* block, int shared,
            const uint8_t* parameters, int parameter_bytes, const uint64_t* begins,
            const uint64_t* ends, const uint64_t* units, const char* const* names,
            int num_allocations, uint64_t seed, char* message, int size) {
  try {
    ptx::Launch launch;
    launch.program = static_cast<const ptx::Program*>(program);
    launch.grid = {grid[0], grid[1], grid[2]};
    launch.block = {block[0], block[1], block[2]};
    launch.dynamic_shared = shared;
    launch.parameters.assign(parameters, parameters + parameter_bytes);
    for (int i = 0; i < num_allocations; ++i)
      launch.allocations.push_back({begins[i], ends[i], names[i], units[i]});
    std::sort(launch.allocations.begin(), launch.allocations.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    launch.seed = seed;
    launch.watches_warps = false;  // Triton loads a scalar in every warp, and one of them stores it
    ptx::run(launch);
    return 0;
  } catch (const std::exception& error) {
    return told(error, message, size);
  }
}
}
