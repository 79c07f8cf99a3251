// What the bindings of CUDA kernels share: dtypes, the current stream, the check of a launch. Only
// c10/cuda headers: `make check-cuda` compiles the bindings against a CPU-only torch too (with
// tools/compat), where ATen/cuda/CUDAContext.h cannot be included.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../common/binding.h"
#include "types.h"

namespace fusedops::cuda {

inline Type type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Type::f32;
    case at::kHalf:
      return Type::f16;
    case at::kBFloat16:
      return Type::bf16;
    case at::kDouble:
      return Type::f64;
    default:
      TORCH_CHECK_TYPE(false, "the CUDA kernels take float32, float16, bfloat16 and float64, got ",
                       tensor.scalar_type());
  }
}

// Parameters share one dtype, that of the data or float32: when weight and bias differ, the
// narrower one is widened. Either may be undefined.
inline Type align_parameters(const at::Tensor& data, at::Tensor& weight, at::Tensor& bias) {
  if (weight.defined() && bias.defined() && weight.scalar_type() != bias.scalar_type()) {
    weight = weight.to(at::kFloat);
    bias = bias.to(at::kFloat);
  }
  return type_of(weight.defined() ? weight : bias.defined() ? bias : data);
}

}  // namespace fusedops::cuda
