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
      TORCH_CHECK_TYPE(
          false, "the compiled kernels take float32, bfloat16, float16 and float64, got ", type);
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

// A gradient as the kernels read it: dense, of the dtype of the data; or undefined.
inline at::Tensor gradient(const std::optional<at::Tensor>& grad, const at::Tensor& data) {
  return grad.has_value() && grad->defined() ? grad->to(data.scalar_type()).contiguous()
                                             : at::Tensor();
}

// Dropout with probability p from a dense seed tensor of this machine, or none.
inline Dropout dropout_of(const at::Tensor& seed, double p) {
  TORCH_CHECK(seed.defined() || p == 0.0 || p == 1.0, "dropout with p = ", p, " needs a seed");
  return Dropout(seed.defined() ? seed.const_data_ptr<int64_t>() : nullptr, p);
}

// The same, of rows that may have a place: the seed must outlive what is returned.
inline Dropout row_dropout_of(const at::Tensor& seed, double p) {
  auto dropout = dropout_of(seed, p);
  if (!seed.defined() || seed.numel() == 2) return dropout;
  const int64_t* numbers = seed.const_data_ptr<int64_t>() + 2;
  const int64_t pieces = seed.numel() - 5;
  TORCH_CHECK_VALUE(
      pieces > 0 && numbers[2] > 0 && numbers[0] / pieces == numbers[2] && numbers[0] % pieces == 0,
      "seed must be {seed, offset}, or also {run, stride, unit} and a number for "
      "each of the run / unit pieces of a run");
  dropout.places.numbers = numbers;
  return dropout;
}

// Returns body(pointer) of the values of a dense tensor of statistics, float or double.
template <typename Body>
inline auto with_statistics(const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kDouble) return body(tensor.mutable_data_ptr<double>());
  return body(tensor.mutable_data_ptr<float>());
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
