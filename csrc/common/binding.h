// What bindings share: dtype of a tensor, pointers of optional tensors, dense copies.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "dtype.h"

namespace fusedops {

inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kDouble:
      return DType::f64;
    default:
      TORCH_CHECK_TYPE(false, "the C++ kernels take float32, bfloat16 and float64, got ",
                       tensor.scalar_type());
  }
}

// Statistics and accumulators: float64 for float64 data, else float32.
inline at::ScalarType statistics_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The tensor laid out densely in row-major order (itself when it already is), or undefined.
inline at::Tensor dense(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->contiguous() : at::Tensor();
}

inline const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

}  // namespace fusedops
