// Places drawn buffers, and checks that none overlaps another one that lives at the same time.
#include "host/arena.h"

#include <cstdio>
#include <random>

using fusedops::arena::Buffer;
using fusedops::arena::Placement;

int main() {
  std::mt19937 random(0);
  for (int count : {0, 1, 2, 9, 40, 150, 600}) {
    std::vector<Buffer> buffers;
    for (int i = 0; i < count; ++i) {
      const int64_t begin = random() % 50, end = begin + 1 + random() % 20;
      buffers.push_back({begin, end, int64_t(random() % 4096)});
    }
    if (count > 5) buffers[5].pinned = count > 100 ? fusedops::arena::kFree : 64;
    const Placement found = fusedops::arena::place(buffers, fusedops::arena::kFree, 0.3);
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
