// Binding of add_rms_norm on the CPU: fusedops_cpp::add_rms_norm and its backward.
// Arguments were checked by fusedops/ops/add_rms_norm.py.
#include <torch/library.h>

#include "norm_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Tensors3 forward(const at::Tensor& input, const at::Tensor& residual,
                 at::IntArrayRef normalized_shape, const Optional& weight, const Optional& seed,
                 double eps, double weight_offset, std::string_view rounding, double dropout_p,
                 at::ScalarType /*input_dtype*/) {
  const auto results = run_norm(rms_kind(weight_offset, rounding), input, residual,
                                normalized_shape, weight, std::nullopt, seed, eps, dropout_p);
  return {results.output, results.summed, results.rstd};
}

Tensors3 backward(const Optional& grad_normed, const Optional& grad_summed,
                  const at::Tensor& summed, const Optional& weight, const at::Tensor& rstd,
                  const Optional& seed, at::IntArrayRef normalized_shape, double /*eps*/,
                  double weight_offset, std::string_view rounding, double dropout_p,
                  at::ScalarType input_dtype, c10::List<bool> output_mask) {
  const auto grads =
      run_norm_backward(rms_kind(weight_offset, rounding), grad_normed, grad_summed, summed, weight,
                        std::nullopt, rstd, seed, normalized_shape, dropout_p, input_dtype,
                        {output_mask[0], output_mask[1], output_mask[2], false});
  return {grads.input, grads.residual, grads.weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("add_rms_norm", forward);
  m.impl("add_rms_norm_backward", backward);
}

}  // namespace fusedops
