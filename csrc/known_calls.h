// What the router knows of calls of an operator that ran before: that they satisfy the operator's
// contract, and the launches to repeat.
//
// A contract speaks of shapes, strides, dtypes, devices and plain arguments, never of values in
// tensors. Python (fusedops/_core/contract.py) therefore checks the first call of each signature,
// and later calls of the same signature need no check.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>

#include "launch_plan.h"

namespace fusedops {

// What decides whether a call satisfies its contract and, if `with_launches`, which kernels it
// launches: all of its arguments but the values in its tensors.
class Signature {
 public:
  // `unread`: the numbers that the contract does not read, such as a learning rate; they are only
  // written where a plan is possible. Returns false for arguments that no signature can have.
  bool write(at::ArrayRef<c10::IValue> arguments, const std::vector<int64_t>& unread,
             bool with_launches);

  // Whether a plan can be recorded: plans have no lists of tensors or of floats.
  bool may_have_plan() const { return may_have_plan_; }
  size_t size() const { return numbers_.size(); }
  size_t hash() const;
  bool operator==(const Signature& other) const { return numbers_ == other.numbers_; }

 private:
  bool write_list(at::ArrayRef<c10::IValue> elements);
  void write_tensor(const at::Tensor& tensor, bool with_alignment);

  std::vector<int64_t> numbers_;
  bool may_have_plan_ = false;
};

// The calls of one operator.
class KnownCalls {
 public:
  struct Answer {
    bool checked = false;                    // it satisfies the contract
    bool record = false;                     // Python should record a plan now
    std::shared_ptr<const LaunchPlan> plan;  // null where there is none
  };

  // A plan is recorded when a signature comes for the second time: shapes that differ in every call
  // are not worth a record.
  Answer find(const Signature& signature);
  // Stores a call that Python has checked and run; a plan that is null is not recorded again.
  void put(const Signature& signature, std::shared_ptr<const LaunchPlan> plan);
  void clear();

 private:
  struct Hash {
    size_t operator()(const Signature& signature) const { return signature.hash(); }
  };
  struct Entry {
    bool asked = false;
    std::shared_ptr<const LaunchPlan> plan;
  };
  std::shared_mutex mutex_;
  std::unordered_map<Signature, Entry, Hash> entries_;
  size_t numbers_ = 0;  // in all signatures
};

}  // namespace fusedops
