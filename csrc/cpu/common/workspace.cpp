// See workspace.h. In a plain file, so that there is one set of buffers for all instruction sets.
#include "workspace.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include <ATen/Context.h>

namespace fusedops {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kKeptBytes = size_t{16} << 20;
constexpr int kSlots = 8;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

struct Buffer {
  std::unique_ptr<void, Free> memory;
  size_t bytes = 0;
};

thread_local Buffer buffers[kSlots];

// As torch fills the tensors of torch.empty: for tests that no kernel reads what it did not write.
bool fills_uninitialized_memory() {
  const auto& context = at::globalContext();
  return C10_UNLIKELY(context.deterministicAlgorithms()) &&
         context.deterministicFillUninitializedMemory();
}

}  // namespace

void* workspace(Workspace slot, size_t bytes) {
  Buffer& buffer = buffers[static_cast<int>(slot)];
  const bool oversized = buffer.bytes > kKeptBytes && bytes <= kKeptBytes;
  if (bytes > buffer.bytes || oversized) {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.memory.reset();
    buffer.bytes = 0;
    buffer.memory.reset(std::aligned_alloc(kAlignment, rounded));
    if (buffer.memory == nullptr) throw std::bad_alloc();
    buffer.bytes = rounded;
  }
  if (fills_uninitialized_memory()) std::memset(buffer.memory.get(), 0xff, bytes);
  return buffer.memory.get();
}

}  // namespace fusedops
