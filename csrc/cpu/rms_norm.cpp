// Binding of rms_norm on the CPU: fusedops_cpp::rms_norm and fusedops_cpp::rms_norm_backward.
// Arguments were checked by fusedops/ops/rms_norm.py.
#include <torch/library.h>

#include "norm_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors2 = std::tuple<at::Tensor, at::Tensor>;

Tensors2 forward(const at::Tensor& input, at::IntArrayRef normalized_shape, const Optional& weight,
                 double eps, double weight_offset, std::string_view rounding) {
  const auto results =
      run_norm(rms_kind(weight_offset, rounding), input, std::nullopt, normalized_shape, weight,
               std::nullopt, std::nullopt, eps, /*dropout_p=*/0.0);
  return {results.output, results.rstd};
}

Tensors2 backward(const Optional& grad_output, const at::Tensor& input, const Optional& weight,
                  const at::Tensor& rstd, at::IntArrayRef normalized_shape, double /*eps*/,
                  double weight_offset, std::string_view rounding, c10::List<bool> output_mask) {
  const auto grads =
      run_norm_backward(rms_kind(weight_offset, rounding), grad_output, std::nullopt, input, weight,
                        std::nullopt, rstd, std::nullopt, normalized_shape, /*dropout_p=*/0.0,
                        input.scalar_type(), {output_mask[0], false, output_mask[1], false});
  return {grads.input, grads.weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("rms_norm", forward);
  m.impl("rms_norm_backward", backward);
}

}  // namespace fusedops
