// Tensors under watch: an allocator of torch whose memory kernels may use to the byte, and which
// holds NaN of any type, as the padding around it does, until something is written.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace {

constexpr size_t kAlignment = 64;  // torch's own
constexpr size_t kPadding = 256;   // before and after

struct Watched final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::kCPU};
    const size_t all = (size + 2 * kPadding + kAlignment - 1) / kAlignment * kAlignment;
    auto* padded = static_cast<char*>(std::aligned_alloc(kAlignment, all));
    std::memset(padded, 0xff, all);
    char* begin = padded + kPadding;
    cuda_on_host::add_memory(begin, size);
    return {begin, begin, &release, c10::kCPU};
  }
  static void release(void* begin) {
    if (begin == nullptr) return;
    cuda_on_host::remove_memory(begin);
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

// New tensors are watched, or are what they were before. The priority is that of the allocator of
// arenas, which a test in this process may have installed.
extern "C" [[gnu::visibility("default")]] void cuda_on_host_watch(bool on) {
  if (on && c10::GetCPUAllocator() != &watched) usual = c10::GetCPUAllocator();
  if (usual != nullptr) c10::SetCPUAllocator(on ? &watched : usual, /*priority=*/1);
}
