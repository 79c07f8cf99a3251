// Binding of grouped_mm on the CPU: fusedops_cpp::grouped_mm, and two forms of its backward: one
// makes the gradients of the parameters (grouped_mm_backward), one adds them to buffers
// (grouped_mm_add_gradients).
// Arguments were checked by fusedops/ops/grouped_mm.py, but for the values of the offsets.
//
// The products of all groups are one batch (gemm.isa.cpp) with linear_act's epilogue; so are the
// two products of the backward, for which one pass makes the gradient of the pre-activation.
#include "grouped_mm.h"

#include <array>

#include <torch/library.h>

#include "grouped_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr const char* kOp = "grouped_mm";

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& weight,
                                           const at::Tensor& offsets, const Optional& bias,
                                           std::string_view activation, bool keep_preactivation) {
  const auto act = parse_activation(activation);
  const Groups groups(kOp, offsets, input.size(0));
  const auto output = at::empty({input.size(0), weight.size(2)}, input.options());
  at::Tensor kept;
  if (keep_preactivation && act != Activation::identity) kept = at::empty_like(output);
  grouped_product(groups, matrix(input), weight, dense(bias), act, kept, output);
  return {output, kept.defined() ? kept : at::empty({0}, input.options())};
}

// The gradient of the sums: grad_output * act'(preactivation), for the rows of groups.
at::Tensor sums_gradient(const Groups& groups, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& weight, const Optional& bias,
                         const at::Tensor& preactivation, Activation act) {
  if (act == Activation::identity) return grad;
  auto kept = preactivation.contiguous();
  if (kept.numel() != grad.numel()) {
    kept = at::empty_like(grad);
    grouped_product(groups, matrix(input), weight, dense(bias), Activation::identity, at::Tensor(),
                    kept);
  }
  const auto dz = at::empty_like(grad);
  const ActivationGradient arguments{data(grad),   data(kept), mutable_data(dz),
                                     nullptr,      nullptr,    groups.rows(),
                                     grad.size(1), act,        dtype_of(grad)};
  FUSEDOPS_CALL_ISA(activation_gradient, arguments);
  return dz;
}

at::Tensor input_gradient(const Groups& groups, const at::Tensor& dz, const at::Tensor& weight,
                          const at::Tensor& input) {
  const auto dx = at::empty(input.sizes(), input.options());
  grouped_product(groups, matrix(dz), weight.transpose(1, 2), at::Tensor(), Activation::identity,
                  at::Tensor(), dx);
  return dx;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& offsets, const Optional& bias, const at::Tensor& preactivation,
    std::string_view activation, bool /*keep_preactivation*/, std::array<bool, 3> output_mask) {
  const Groups groups(kOp, offsets, input.size(0));
  const auto dz = sums_gradient(groups, grad_output->contiguous(), input, weight, bias,
                                preactivation, parse_activation(activation));
  at::Tensor dx, dweight, dbias;
  if (output_mask[0]) dx = input_gradient(groups, dz, weight, input);
  if (output_mask[1]) dweight = grouped_weight_gradient(groups, matrix(input), matrix(dz), weight);
  if (output_mask[2]) dbias = grouped_row_sums(groups, dz);
  return {dx, dweight, dbias};
}

// The same, with the parameters' gradients added to buffers.
at::Tensor add_gradients(const Optional& into_weight, const Optional& into_bias,
                         const at::Tensor& grad_output, const at::Tensor& input,
                         const at::Tensor& weight, const at::Tensor& offsets, const Optional& bias,
                         const at::Tensor& preactivation, std::string_view activation,
                         bool /*keep_preactivation*/, std::array<bool, 1> output_mask) {
  const Groups groups(kOp, offsets, input.size(0));
  const auto dz = sums_gradient(groups, grad_output.contiguous(), input, weight, bias,
                                preactivation, parse_activation(activation));
  if (into_weight.has_value()) {
    add_weight_gradient(kOp, groups, matrix(input), matrix(dz), input, *into_weight);
  }
  if (into_bias.has_value()) add_row_sums(kOp, groups, dz, *into_bias);
  return output_mask[0] ? input_gradient(groups, dz, weight, input) : at::Tensor();
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("grouped_mm", forward);
  m.impl("grouped_mm_backward", backward);
  m.impl("grouped_mm_add_gradients", add_gradients);
}

}  // namespace fusedops
