// Loops whose elements depend on their own place alone: rows cut into blocks that the threads
// share. Dense tensors come as one long row. Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/parallel.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Columns that are not divided: a multiple of every vector, so that only a row's end is no vector.
constexpr int64_t kBlock = 4096;

// Calls body(row, first column, number of columns) over disjoint stretches of rows.
template <typename F>
inline void parallel_blocks(int64_t rows, int64_t columns, int64_t bytes_per_element,
                            const F& body) {
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const int64_t bytes = std::min(columns, kBlock) * bytes_per_element;
  parallel_rows(rows * blocks, bytes, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / blocks, block = begin % blocks;
      const int64_t num_blocks = std::min(end - begin, blocks - block);
      const int64_t first = block * kBlock;
      body(row, first, std::min(columns - first, num_blocks * kBlock));
      begin += num_blocks;
    }
  });
}

// Whether parallel_blocks may stream such an output. One long row may have any length: its end is
// no full vector.
template <typename T>
inline bool streams_blocks(const void* output, int64_t rows, int64_t columns) {
  const auto* to = static_cast<const T*>(output);
  return rows == 1 ? should_stream(to, columns / kBlock, kBlock) : should_stream(to, rows, columns);
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
