// A step's arena for Python: what the classes for the host's memory and for a device's share.
#pragma once

#include <torch/custom_class.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "step_arena.h"

namespace fusedops {

using Integers = std::vector<int64_t>;

class StepArenaBinding : public torch::CustomClassHolder {
 public:
  ~StepArenaBinding() override { arena_->close(); }

  virtual bool begin(int64_t plan) { return arena_->begin(plan); }
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

 protected:
  explicit StepArenaBinding(arena::Device* device = nullptr)
      : arena_(new arena::StepArena(device)) {}

  arena::StepArena* const arena_;  // never destroyed
};

// A method of the base as one of `Arena`, the class that torch knows.
template <typename Arena, typename Result, typename... Values>
auto method_of(Result (StepArenaBinding::*method)(Values...)) {
  return [method](const c10::intrusive_ptr<Arena>& self, Values... values) {
    return ((*self).*method)(std::move(values)...);
  };
}

// Registers a class derived from it, with its constructor.
template <typename Arena, typename Init>
void bind_step_arena(torch::Library& m, Init init) {
  using Base = StepArenaBinding;
  m.class_<Arena>("StepArena")
      .def(init)
      .def("begin", method_of<Arena>(&Base::begin))
      .def("mark", method_of<Arena>(&Base::mark))
      .def("end", method_of<Arena>(&Base::end))
      .def("is_open", method_of<Arena>(&Base::is_open))
      .def("is_open_here", method_of<Arena>(&Base::is_open_here))
      .def("set_plan", method_of<Arena>(&Base::set_plan))
      .def("drop_plan", method_of<Arena>(&Base::drop_plan))
      .def("renew", method_of<Arena>(&Base::renew))
      .def("close", method_of<Arena>(&Base::close))
      .def("record", method_of<Arena>(&Base::record))
      .def("counts", method_of<Arena>(&Base::counts))
      .def("contains", method_of<Arena>(&Base::contains));
}

}  // namespace fusedops
