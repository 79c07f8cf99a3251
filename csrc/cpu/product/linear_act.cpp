// Binding of linear_act on the CPU: fusedops_cpp::linear_act and fusedops_cpp::linear_act_backward.
// Arguments were checked by fusedops/ops/linear_act.py.
#include <array>

#include <torch/library.h>

#include "linear_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

std::vector<int64_t> output_shape(const at::Tensor& input, const at::Tensor& weight) {
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  return shape;
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& weight,
                                           const Optional& bias, std::string_view activation,
                                           bool keep_preactivation) {
  const auto act = parse_activation(activation);
  const bool keeps = keep_preactivation && act != Activation::identity;
  auto output = at::empty(output_shape(input, weight), input.options());
  auto kept = keeps ? at::empty(output.sizes(), input.options()) : at::Tensor();
  linear_into(as_rows(input), weight, dense(bias), act, kept, output);
  return {output, keeps ? kept : at::empty({0}, input.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& weight,
    const Optional& bias, const at::Tensor& preactivation, std::string_view activation,
    bool /*keep_preactivation*/, std::array<bool, 3> output_mask) {
  const auto act = parse_activation(activation);
  const auto dy = as_rows(grad_output->contiguous());
  const int64_t rows = dy.size(0), columns = weight.size(0);
  // Else only the shape of the input is known (shape_only in fusedops/ops/linear_act.py).
  const bool reads_input = act != Activation::identity || output_mask[1];
  const auto x = reads_input ? as_rows(input) : dy;
  at::Tensor kept, dz = dy, dbias, partials;
  if (act != Activation::identity) {
    if (preactivation.numel() == dy.numel()) {
      kept = preactivation.contiguous();
    } else {
      // The forward ran without a gradient in view: make the pre-activation again.
      kept = at::empty({rows, columns}, x.options());
      linear_into(x, weight, dense(bias), Activation::identity, at::Tensor(), kept);
    }
    dz = at::empty({rows, columns}, x.options());
  }
  if (output_mask[2]) {
    dbias = at::empty({columns}, x.options());
    partials = at::empty({Chunks(rows).count, columns}, x.options().dtype(statistics_type(x)));
  }
  if (act != Activation::identity || output_mask[2]) {
    const ActivationGradient arguments{data(dy),
                                       data(kept),
                                       act == Activation::identity ? nullptr : mutable_data(dz),
                                       mutable_data(dbias),
                                       mutable_data(partials),
                                       rows,
                                       columns,
                                       act,
                                       dtype_of(x)};
    FUSEDOPS_CALL_ISA(activation_gradient, arguments);
  }
  at::Tensor dx, dweight;
  if (output_mask[0]) dx = linear_grad_input(dz, weight).view(input.sizes());
  if (output_mask[1]) dweight = linear_grad_weight(dz, x, weight);
  return {dx, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("linear_act", forward);
  m.impl("linear_act_backward", backward);
}

}  // namespace fusedops
