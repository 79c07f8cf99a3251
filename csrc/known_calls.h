// What the router knows of calls of an operator that ran before: that they satisfy the operator's
// contract.
//
// A contract speaks of shapes, strides, dtypes, devices and plain arguments, never of values in
// tensors. Python (fusedops/_core/contract.py) therefore checks the first call of each signature,
// and later calls of the same signature need no check.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <unordered_set>
#include <vector>

#include <ATen/core/ivalue.h>

namespace fusedops {

// What decides whether a call satisfies its contract: all of its arguments but the values in its
// tensors.
class Signature {
 public:
  // `unread`: the numbers that the contract does not read, such as a learning rate. Returns false
  // for arguments that no signature can have.
  bool write(at::ArrayRef<c10::IValue> arguments, const std::vector<int64_t>& unread);

  size_t size() const { return numbers_.size(); }
  size_t hash() const;
  bool operator==(const Signature& other) const { return numbers_ == other.numbers_; }

 private:
  bool write_list(at::ArrayRef<c10::IValue> elements);
  void write_tensor(const at::Tensor& tensor);

  std::vector<int64_t> numbers_;
};

// The calls of one operator.
class KnownCalls {
 public:
  bool contains(const Signature& signature);
  void add(const Signature& signature);

 private:
  struct Hash {
    size_t operator()(const Signature& signature) const { return signature.hash(); }
  };
  std::shared_mutex mutex_;
  std::unordered_set<Signature, Hash> signatures_;
  size_t numbers_ = 0;  // in all signatures
};

}  // namespace fusedops
