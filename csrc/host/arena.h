// Offsets for buffers of known lifetimes in one block of memory, as low as possible (dynamic
// storage allocation, which is NP-hard). No Python and no torch: a sanitizer can watch it, and any
// program can use it.
//
// arena.cpp          splits the problem, sets targets and shares the time
// arena_greedy.cpp   places buffers one by one in some order, and improves orders by local search
// arena_exact.cpp    decides by a complete search whether the buffers fit below a target
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace fusedops::arena {

inline constexpr int64_t kFree = -1;

struct Buffer {
  int64_t lower, upper;  // alive in [lower, upper)
  int64_t size;
  int64_t pinned = kFree;  // the offset that it must have
};

struct Placement {
  std::vector<int64_t> offsets;
  int64_t height = 0;  // the largest offset + size
  int64_t bound = 0;   // no placement is lower
};

// Places all buffers. Stops as soon as the height is at most `capacity`, if there is one (kFree:
// none), when it is the lowest possible, or after so many seconds.
Placement place(const std::vector<Buffer>& buffers, int64_t capacity, double seconds);

// What the parts share.

using Clock = std::chrono::steady_clock;

// Buffers whose lifetimes overlap, so that their memory must not. `begin` and `end` are times.
struct Item {
  int64_t begin, end, size;
  int64_t pinned;

  int64_t length() const { return end - begin; }
};

// For each item the items that live at the same time.
class Neighbours {
 public:
  Neighbours(const std::vector<Item>& items, int64_t most_pairs);

  // Whether there are lists; where there are too many pairs there are none.
  bool listed() const { return listed_; }
  const int* begin(int item) const { return list_.data() + start_[item]; }
  const int* end(int item) const { return list_.data() + start_[item + 1]; }

 private:
  bool listed_ = false;
  std::vector<int64_t> start_;
  std::vector<int> list_;
};

// Orders of the items by rules: those with which the complete search usually ends first come first.
std::vector<std::vector<int>> heuristic_orders(const std::vector<Item>& items);

// Improves placements until one is at most `target` high, or until the deadline. `best` and
// `height` are the lowest placement so far, and change where a lower one is found.
void search_orders(const std::vector<Item>& items, const Neighbours& neighbours, int64_t target,
                   Clock::time_point deadline, std::vector<int64_t>& best, int64_t& height);

// Orders alone, each once: the first look at a problem of any size.
void try_orders(const std::vector<Item>& items, const Neighbours& neighbours, int64_t target,
                Clock::time_point deadline, std::vector<int64_t>& best, int64_t& height);

enum class Answer { kFits, kDoesNotFit, kUnknown };

// Decides whether the items fit below `capacity`; the offsets are in `offsets` if they do. Pinned
// items are not supported. Gives up at the deadline, or after `most_nodes`.
Answer fits(const std::vector<Item>& items, const Neighbours& neighbours,
            const std::vector<int>& order, int64_t capacity, int64_t most_nodes,
            Clock::time_point deadline, std::vector<int64_t>& offsets);

}  // namespace fusedops::arena
