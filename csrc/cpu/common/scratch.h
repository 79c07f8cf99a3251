// Memory of a task for its own use: a vector that starts at a cache line.
//
// The alignment matters: std::vector's 16 bytes make every access of 64 bytes straddle two lines.
// On two Zen 4 cores that took add_layer_norm of 4096 x 1024 bfloat16 from 0.98 to 1.40 ms.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
struct LineAllocator {
  using value_type = A;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename B>
  LineAllocator(const LineAllocator<B>&) {}

  A* allocate(size_t count) { return static_cast<A*>(::operator new(count * sizeof(A), kLine)); }
  void deallocate(A* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};

template <typename A>
using Scratch = std::vector<A, LineAllocator<A>>;

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
