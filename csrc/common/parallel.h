// Parallel loops over rows. Results never depend on the number of threads: a loop without a
// reduction treats every row alike, and a loop with one cuts the rows into chunks whose number
// depends on the number of rows alone; partial results are then added in chunk order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <ATen/Parallel.h>

namespace fusedops {

// Below about this many bytes, some 10 us of work, a task is not worth a thread: the barrier alone
// costs 2 to 10 us.
inline constexpr int64_t kBytesPerTask = 512 * 1024;

// Calls f(begin, end) over disjoint ranges of rows.
template <typename F>
inline void parallel_rows(int64_t rows, int64_t bytes_per_row, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, bytes_per_row));
  if (rows <= grain || at::get_num_threads() == 1) {
    if (rows > 0) f(int64_t{0}, rows);
    return;
  }
  at::parallel_for(0, rows, grain, f);
}

// Calls run(next) on each thread; next() gives the tasks 0, 1, ... one at a time and -1 after the
// last. Which thread runs a task does not show in the result, and a thread that another process
// holds up leaves its tasks to the others.
template <typename Run>
void share_tasks(int64_t tasks, const Run& run) {
  std::atomic<int64_t> taken{0};
  const auto next = [&taken, tasks]() -> int64_t {
    const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
    return task < tasks ? task : -1;
  };
  const int64_t threads = std::min<int64_t>(tasks, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { run(next); });
}

// The cut of `rows` into chunks for a reduction: at most 32 chunks, at least 32 rows each.
struct Chunks {
  explicit Chunks(int64_t rows)
      : rows(rows),
        rows_per_chunk(std::max<int64_t>(32, (rows + 31) / 32)),
        count((rows + rows_per_chunk - 1) / rows_per_chunk) {}
  int64_t begin(int64_t chunk) const { return chunk * rows_per_chunk; }
  int64_t end(int64_t chunk) const { return std::min(rows, (chunk + 1) * rows_per_chunk); }

  int64_t rows;
  int64_t rows_per_chunk;
  int64_t count;
};

}  // namespace fusedops
