// Binding of add_layer_norm on the CPU: fusedops_cpp::add_layer_norm and its backward.
// Arguments were checked by fusedops/ops/add_layer_norm.py.
#include <torch/library.h>

#include "norm_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr NormKind kKind{.centred = true};

Tensors4 forward(const at::Tensor& input, const at::Tensor& residual,
                 at::IntArrayRef normalized_shape, const Optional& weight, const Optional& bias,
                 const Optional& seed, double eps, double dropout_p,
                 at::ScalarType /*input_dtype*/) {
  const auto results =
      run_norm(kKind, input, residual, normalized_shape, weight, bias, seed, eps, dropout_p);
  return {results.output, results.summed, results.mean, results.rstd};
}

Tensors4 backward(const Optional& grad_normed, const Optional& grad_summed,
                  const at::Tensor& summed, const Optional& weight, const at::Tensor& mean,
                  const at::Tensor& rstd, const Optional& seed, at::IntArrayRef normalized_shape,
                  double /*eps*/, double dropout_p, at::ScalarType input_dtype,
                  c10::List<bool> output_mask) {
  const auto grads = run_norm_backward(
      kKind, grad_normed, grad_summed, summed, weight, mean, rstd, seed, normalized_shape,
      dropout_p, input_dtype, {output_mask[0], output_mask[1], output_mask[2], output_mask[3]});
  return {grads.input, grads.residual, grads.weight, grads.bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("add_layer_norm", forward);
  m.impl("add_layer_norm_backward", backward);
}

}  // namespace fusedops
