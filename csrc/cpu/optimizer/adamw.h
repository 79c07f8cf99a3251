// Interface between the bindings of adamw and square_sums and their kernels.
//
// The elements of all tensors of a call are cut into chunks, each of one tensor: threads share
// chunks, so that a thousand small parameters cost one parallel loop. Where a tensor is cut depends
// on its own size alone.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

inline constexpr int64_t kUpdateChunk = 16384;  // elements: with bfloat16 gradients 32 KiB of them

constexpr int64_t update_chunks(int64_t numel) {
  return (numel + kUpdateChunk - 1) / kUpdateChunk;
}

// What is read and what is written. In place both are the same; a step that may yet be dropped
// writes to other memory than it reads. What is only written is not read from anywhere.
struct Updated {
  const void* from = nullptr;
  void* to = nullptr;
};

// Where the elements of a local tensor stand in the whole parameter, in row-major order: element i
// is number base + i / run * pitch + i % run.
struct Place {
  int64_t base = 0;
  int64_t run = 1;
  int64_t pitch = 1;
};

struct AdamWTensor {
  Updated param;
  Updated exp_avg;
  Updated exp_avg_sq;
  Updated max_exp_avg_sq;  // null without amsgrad
  const void* grad;
  // param rounded to its own dtype, or null. An element of param that does not round to what the
  // copy holds begins the step with the value of the copy.
  Updated copy;
  int64_t numel;
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype;
  DType copy_dtype;
  double step_size;     // lr / (1 - beta1^t)
  double inverse_root;  // 1 / sqrt(1 - beta2^t)
  double decay;         // lr * weight_decay
  // Of stochastic rounding: Philox with this key and the offsets `offset` and `offset` + 1.
  uint64_t key;
  uint64_t offset;
  Place place;
};

struct AdamWCall {
  const AdamWTensor* tensors;
  const int64_t* first_chunks;  // [count + 1]: of each tensor, and how many there are
  int64_t count;
  double beta1;
  double beta2;
  double eps;
  double grad_factor;  // negative to maximize
  bool stochastic;     // how float32 becomes bfloat16 in param and states
  bool stream;         // what is only written goes around the cache
};

struct SquareSumsTensor {
  const void* data;
  int64_t numel;
  DType dtype;
};

struct SquareSumsCall {
  const SquareSumsTensor* tensors;
  const int64_t* first_chunks;
  int64_t count;
  double* partials;  // [chunks]
};

}  // namespace fusedops

// The chunks first .. last - 1 of a call, on the calling thread.
FUSEDOPS_DECLARE_ISA(adamw_chunks, const AdamWCall&, int64_t first, int64_t last)
FUSEDOPS_DECLARE_ISA(square_sums_chunks, const SquareSumsCall&, int64_t first, int64_t last)
