// Torch's CPU allocator while steps of arenas (step_arena.h) are used, and their binding.
//
// It is set when the first arena is made, and stays: a storage remembers its allocator. Outside of
// steps it passes each call to the allocator before it, whose memory it does not wrap.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <mutex>

#include "step_arena.h"

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

using Integers = std::vector<int64_t>;

class StepArenaBinding : public torch::CustomClassHolder {
 public:
  StepArenaBinding() { install(); }
  ~StepArenaBinding() override { arena_->close(); }

  bool begin(int64_t plan) { return arena_->begin(plan); }
  void mark() { arena_->mark(); }
  bool end() { return arena_->end(); }
  bool is_open() { return arena_->is_open(); }
  bool is_open_here() { return arena_->is_open_here(); }
  void set_plan(int64_t id, Integers sizes, Integers offsets, Integers marks, int64_t height) {
    arena_->set_plan(id, {std::move(sizes), std::move(offsets), std::move(marks), height});
  }
  void drop_plan(int64_t id) { arena_->drop_plan(id); }
  void renew() { arena_->renew(); }
  void close() { arena_->close(); }
  // Sizes, ends, whether these are in the next step, and marks.
  std::vector<Integers> record(bool previous) {
    auto record = arena_->record(previous);
    return {record.sizes, record.ends, record.in_next, record.marks};
  }
  // In the order of arena::Counts, then the bytes of the block and the live ones in it.
  Integers counts() {
    const auto c = arena_->counts();
    return {c.buffers, c.bytes, c.served,      c.unplanned,           c.occupied,          c.kept,
            c.outside, c.small, c.small_bytes, arena_->block_bytes(), arena_->live_bytes()};
  }
  bool contains(int64_t address) { return arena_->contains(reinterpret_cast<void*>(address)); }

 private:
  arena::StepArena* const arena_ = new arena::StepArena;  // never destroyed
};

}  // namespace
}  // namespace fusedops

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  using Arena = fusedops::StepArenaBinding;
  m.class_<Arena>("StepArena")
      .def(torch::init<>())
      .def("begin", &Arena::begin)
      .def("mark", &Arena::mark)
      .def("end", &Arena::end)
      .def("is_open", &Arena::is_open)
      .def("is_open_here", &Arena::is_open_here)
      .def("set_plan", &Arena::set_plan)
      .def("drop_plan", &Arena::drop_plan)
      .def("renew", &Arena::renew)
      .def("close", &Arena::close)
      .def("record", &Arena::record)
      .def("counts", &Arena::counts)
      .def("contains", &Arena::contains);
}
