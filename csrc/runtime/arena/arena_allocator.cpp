// Torch's CPU allocator while steps of arenas (step_arena.h) are used, and their binding.
//
// It is set when the first arena is made, and stays: a storage remembers its allocator. Outside of
// steps it passes each call to the allocator before it, whose memory it does not wrap.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <mutex>

#include "step_arena_binding.h"

namespace fusedops {
namespace {

using arena::Ticket;

class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t nbytes) override {
    arena::StepArena* const step = arena::current();
    if (step == nullptr || nbytes == 0) return before_->allocate(nbytes);
    Ticket ticket;
    void* const pointer = arena::allocate(*step, static_cast<int64_t>(nbytes), &ticket);
    if (pointer != nullptr) {
      c10::profiledCPUMemoryReporter().New(pointer, nbytes);
      return {pointer, pointer, &free, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DataPtr other = before_->allocate(nbytes);
    if (ticket.arena == nullptr || other.get() != other.get_context()) return other;
    ticket.deleter = other.get_deleter();
    ticket.context = other.release_context();
    arena::track(ticket.context, ticket);
    return {ticket.context, ticket.context, &free, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return before_->raw_deleter() == nullptr ? nullptr : &free;
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  // Of memory of this allocator and of raw memory of the one before it.
  static void free(void* pointer);

 private:
  c10::Allocator* const before_;
};

ArenaAllocator* installed = nullptr;

void ArenaAllocator::free(void* pointer) {
  switch (arena::release(pointer)) {
    case arena::Released::kInBlock:
      return c10::profiledCPUMemoryReporter().Delete(pointer);
    case arena::Released::kElsewhere:
      return;  // its own deleter has reported it
    case arena::Released::kUnknown:
      return installed->before_->raw_deleter()(pointer);
  }
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    installed = new ArenaAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(installed, /*priority=*/1);
  });
}

class HostArena final : public StepArenaBinding {
 public:
  HostArena() { install(); }
};

}  // namespace
}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  fusedops::bind_step_arena<fusedops::HostArena>(m, torch::init<>());
}
