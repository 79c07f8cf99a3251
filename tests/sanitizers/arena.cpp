// Places drawn buffers, and checks that none overlaps another one that lives at the same time. The
// complete search must find a placement wherever trying all offsets does.
#include "host/arena.h"

#include <algorithm>
#include <cstdio>
#include <random>

using namespace fusedops::arena;

namespace {

bool overlap(const Item& a, int64_t at, const Item& b, int64_t other) {
  return a.begin < b.end && b.begin < a.end && at < other + b.size && other < at + a.size;
}

// Whether items fit below a capacity, by trying all offsets.
bool fits_somehow(const std::vector<Item>& items, int64_t capacity, std::vector<int64_t>& offsets) {
  const size_t count = offsets.size();
  if (count == items.size()) return true;
  for (int64_t at = 0; at + items[count].size <= capacity; ++at) {
    bool free = true;
    for (size_t k = 0; k < count; ++k) {
      free = free && !overlap(items[count], at, items[k], offsets[k]);
    }
    if (!free) continue;
    offsets.push_back(at);
    if (fits_somehow(items, capacity, offsets)) return true;
    offsets.pop_back();
  }
  return false;
}

bool search_is_right(std::mt19937& random) {
  std::vector<Item> items;
  const int count = 5 + int(random() % 4);
  int64_t most = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t begin = random() % 6;
    items.push_back({begin, begin + 1 + int64_t(random() % 4), 1 + int64_t(random() % 4), kFree});
  }
  for (const Item& one : items) {
    int64_t alive = 0;
    for (const Item& other : items) {
      if (other.begin <= one.begin && one.begin < other.end) alive += other.size;
    }
    most = std::max(most, alive);
  }
  const Neighbours neighbours(items, 1000);
  std::vector<int64_t> tried, offsets;
  const bool possible = fits_somehow(items, most, tried);
  for (const std::vector<int>& order : heuristic_orders(items)) {
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(60);
    const Answer answer = fits(items, neighbours, order, most, 1 << 20, deadline, offsets);
    if (answer != (possible ? Answer::kFits : Answer::kDoesNotFit)) return false;
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (int draw = 0; draw < 300; ++draw) {
    if (!search_is_right(random)) {
      std::printf("the search is wrong for draw %d\n", draw);
      return 1;
    }
  }
  for (int count : {0, 1, 2, 9, 40, 150, 600}) {
    std::vector<Buffer> buffers;
    for (int i = 0; i < count; ++i) {
      const int64_t begin = random() % 50, end = begin + 1 + random() % 20;
      buffers.push_back({begin, end, int64_t(random() % 4096)});
    }
    if (count > 5) buffers[5].pinned = count > 100 ? kFree : 64;
    const Placement found = place(buffers, kFree, 0.3);
    for (int i = 0; i < count; ++i) {
      for (int k = 0; k < i; ++k) {
        const Buffer &a = buffers[i], &b = buffers[k];
        if (a.lower < b.upper && b.lower < a.upper &&
            found.offsets[i] < found.offsets[k] + b.size &&
            found.offsets[k] < found.offsets[i] + a.size) {
          std::printf("%d and %d overlap\n", i, k);
          return 1;
        }
      }
    }
    if (found.height < found.bound) return 1;
  }
  return 0;
}
