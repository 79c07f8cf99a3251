// What bindings share: dtype of a tensor, pointers of optional tensors, dense copies.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "dtype.h"
#include "philox.h"

namespace fusedops {

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    case at::kDouble:
      return DType::f64;
    default:
      TORCH_CHECK_TYPE(false, "the C++ kernels take float32, bfloat16, float16 and float64, got ",
                       type);
  }
}

inline DType dtype_of(const at::Tensor& tensor) {
  return dtype_of(tensor.scalar_type());
}

// Statistics and accumulators: float64 for float64 data, else float32.
inline at::ScalarType statistics_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The tensor laid out densely in row-major order (itself when it already is), or undefined.
inline at::Tensor dense(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->contiguous() : at::Tensor();
}

// Dropout with probability p from a seed tensor of this machine.
inline Dropout dropout_of(const std::optional<at::Tensor>& seed, double p) {
  const auto pair = dense(seed);
  TORCH_CHECK(pair.defined() || p == 0.0 || p == 1.0, "dropout with p = ", p, " needs a seed");
  if (!pair.defined()) return Dropout(nullptr, p);
  TORCH_CHECK_VALUE(
      pair.numel() == 2 || (pair.numel() == 5 && pair.const_data_ptr<int64_t>()[3] > 0),
      "seed must be {seed, offset}, or also {base, run, stride} with a run above 0");
  return Dropout(pair.const_data_ptr<int64_t>(), p, pair.numel() == 5);
}

inline const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// Parameters share one dtype: when weight and bias differ, the narrower one is widened.
inline DType align_parameters(const at::Tensor& input, at::Tensor& weight, at::Tensor& bias) {
  const auto type = weight.defined() ? weight.scalar_type()
                    : bias.defined() ? bias.scalar_type()
                                     : input.scalar_type();
  if (weight.defined() && bias.defined() && weight.scalar_type() != bias.scalar_type()) {
    weight = weight.to(at::kFloat);
    bias = bias.to(at::kFloat);
    return DType::f32;
  }
  return type == at::kFloat ? DType::f32 : dtype_of(input);
}

}  // namespace fusedops
