// Memory of a task for its own use, aligned to cache lines.
//
// The alignment matters: std::vector's 16 bytes make every access of 64 bytes straddle two lines.
// On two Zen 4 cores that took add_layer_norm of 4096 x 1024 bfloat16 from 0.98 to 1.40 ms.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t count, A value = A(0)) {
    constexpr size_t kLine = 64;
    const size_t bytes = (static_cast<size_t>(count) * sizeof(A) + kLine - 1) / kLine * kLine;
    if (bytes == 0) return;
    data_ = static_cast<A*>(std::aligned_alloc(kLine, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    std::fill(data_, data_ + count, value);
  }
  Scratch(Scratch&& other) noexcept { *this = static_cast<Scratch&&>(other); }
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Scratch() { std::free(data_); }
  A* data() { return data_; }
  A& operator[](int64_t index) { return data_[index]; }

 private:
  A* data_ = nullptr;
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
