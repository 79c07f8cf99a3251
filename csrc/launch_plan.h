// Launch plans: the allocations and kernel launches of an op's call on a GPU, recorded once and
// repeated without Python.
//
// A Triton launcher is Python: it looks at shapes, picks tiles, allocates outputs and hands some
// forty arguments to Triton, which sorts them at every call. All of it depends on shapes, strides,
// dtypes, alignment and plain numbers alone. fusedops/_core/launch_plans.py records what a launcher
// did for one such signature, and the router (router.cpp) repeats it for the next call with the
// same one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "launch_driver.h"

namespace fusedops {

class LaunchPlan {
 public:
  // What fusedops/_core/launch_plans.py writes: integers, and the texts that they name.
  LaunchPlan(const std::vector<int64_t>& code, const std::vector<std::string>& texts);
  // The whole call is that of a C++ operator with the same arguments.
  explicit LaunchPlan(const c10::OperatorHandle& native);
  ~LaunchPlan();

  // Replaces the arguments on the stack by the results.
  void run(torch::jit::Stack& stack, size_t num_arguments) const;

  bool is_native() const { return native_.has_value(); }

 private:
  struct Steps;
  std::unique_ptr<Steps> steps_;
  std::optional<c10::OperatorHandle> native_;
};

// Whether calls on a kind of device have plans: its driver was given.
bool has_plans(c10::DeviceType device);

// The plan that Python recorded during the call that has just returned in this thread, or null.
std::shared_ptr<const LaunchPlan> take_recorded_plan();

}  // namespace fusedops
