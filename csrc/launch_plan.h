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
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "launch_driver.h"

namespace fusedops {

// What decides which kernels a call launches: all of its arguments but the values in its tensors.
using Signature = std::vector<int64_t>;

// Writes the signature of a call; false where it has an argument that no plan can have.
bool write_signature(at::ArrayRef<c10::IValue> arguments, Signature& signature);

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

// The plans of one operator.
class LaunchPlans {
 public:
  // What is known of a signature: its plan, or whether Python should record one now.
  struct Answer {
    std::shared_ptr<const LaunchPlan> plan;
    bool record = false;
  };

  // A signature is recorded when it comes for the second time: shapes that differ in every call
  // are not worth a record.
  Answer find(const Signature& signature);
  // Null: the signature is not recorded again. A signature that was forgotten stays so.
  void put(const Signature& signature, std::shared_ptr<const LaunchPlan> plan);
  void clear();

 private:
  struct Hash {
    size_t operator()(const Signature& signature) const;
  };
  struct Entry {
    bool asked = false;
    std::shared_ptr<const LaunchPlan> plan;
  };
  std::shared_mutex mutex_;
  std::unordered_map<Signature, Entry, Hash> entries_;
};

// Whether calls on a kind of device have plans: its driver was given.
bool has_plans(c10::DeviceType device);

// The record that Python is asked for by the router, which calls it next in this thread; 0: none.
int64_t request_plan(LaunchPlans& plans, const Signature& signature);
int64_t take_plan_request();

}  // namespace fusedops
