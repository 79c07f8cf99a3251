// Binding of layer_norm on the CPU: fusedops_cpp::layer_norm and fusedops_cpp::layer_norm_backward.
// Arguments were checked by fusedops/ops/layer_norm.py.
#include <torch/library.h>

#include "norm_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

constexpr NormKind kKind{.centred = true};

Tensors3 forward(const at::Tensor& input, at::IntArrayRef normalized_shape, const Optional& weight,
                 const Optional& bias, double eps) {
  const auto results = run_norm(kKind, input, std::nullopt, normalized_shape, weight, bias,
                                std::nullopt, eps, /*dropout_p=*/0.0);
  return {results.output, results.mean, results.rstd};
}

Tensors3 backward(const Optional& grad_output, const at::Tensor& input, const Optional& weight,
                  const at::Tensor& mean, const at::Tensor& rstd, at::IntArrayRef normalized_shape,
                  double /*eps*/, c10::List<bool> output_mask) {
  const auto grads = run_norm_backward(kKind, grad_output, std::nullopt, input, weight, mean, rstd,
                                       std::nullopt, normalized_shape,
                                       /*dropout_p=*/0.0, input.scalar_type(),
                                       {output_mask[0], false, output_mask[1], output_mask[2]});
  return {grads.input, grads.weight, grads.bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("layer_norm", forward);
  m.impl("layer_norm_backward", backward);
}

}  // namespace fusedops
