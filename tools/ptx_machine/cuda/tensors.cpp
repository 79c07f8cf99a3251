// Tensors under watch: an allocator of torch whose memory kernels may use to the byte, and which
// holds NaN of any type, as the padding around it does, until something is written.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "runtime.h"

namespace {

constexpr size_t kAlignment = 64;  // torch's own
constexpr size_t kPadding = 256;   // before and after

std::map<uint64_t, uint64_t> bytes_at;  // of the tensors that exist, by address
std::mutex lock;                        // they may be freed by any thread

struct Watched final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::kCPU};
    const size_t all = (size + 2 * kPadding + kAlignment - 1) / kAlignment * kAlignment;
    auto* padded = static_cast<char*>(std::aligned_alloc(kAlignment, all));
    std::memset(padded, 0xff, all);
    char* begin = padded + kPadding;
    const std::lock_guard guard(lock);
    bytes_at[reinterpret_cast<uint64_t>(begin)] = size;
    return {begin, begin, &release, c10::kCPU};
  }
  static void release(void* begin) {
    if (begin == nullptr) return;
    {
      const std::lock_guard guard(lock);
      bytes_at.erase(reinterpret_cast<uint64_t>(begin));
    }
    std::free(static_cast<char*>(begin) - kPadding);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

Watched watched;
c10::Allocator* usual = nullptr;

}  // namespace

std::vector<ptx::Allocation> ptx::tensors() {
  const std::lock_guard guard(lock);
  std::vector<Allocation> result;
  for (const auto& [begin, bytes] : bytes_at) result.push_back({begin, begin + bytes, "a tensor"});
  return result;
}

// New tensors are watched, or are what they were before. The priority is that of the allocator of
// arenas, which a test in this process may have installed.
extern "C" [[gnu::visibility("default")]] void ptx_cuda_watch(bool on) {
  if (on && c10::GetCPUAllocator() != &watched) usual = c10::GetCPUAllocator();
  if (usual != nullptr) c10::SetCPUAllocator(on ? &watched : usual, /*priority=*/1);
}
