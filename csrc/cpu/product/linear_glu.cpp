// Binding of linear_glu on the CPU: fusedops_cpp::linear_glu and fusedops_cpp::linear_glu_backward.
// Arguments were checked by fusedops/ops/linear_glu.py.
#include "linear_glu.h"

#include <array>

#include <torch/library.h>

#include "linear_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// Both products and what is made of them; undefined results are not written.
void glu_into(const at::Tensor& x, const at::Tensor& gate_weight, const at::Tensor& up_weight,
              Activation activation, double limit, const at::Tensor& gate, const at::Tensor& up,
              const at::Tensor& output) {
  auto call =
      product_of(x.size(0), gate_weight.size(0), x.size(1), matrix(x), transposed(gate_weight), x);
  const Matrix second_b = transposed(up_weight);
  call.second_b = &second_b;
  const LinearGluForward arguments{
      call, mutable_data(gate), mutable_data(up), mutable_data(output), activation, limit};
  FUSEDOPS_CALL_ISA(linear_glu_forward, arguments);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& input,
                                                       const at::Tensor& gate_weight,
                                                       const at::Tensor& up_weight,
                                                       std::string_view activation, double limit,
                                                       bool keep_preactivations) {
  auto shape = input.sizes().vec();
  shape.back() = gate_weight.size(0);
  const auto output = at::empty(shape, input.options());
  if (!keep_preactivations) shape = {0};
  const auto gate = at::empty(shape, input.options()), up = at::empty(shape, input.options());
  const at::Tensor none;
  glu_into(as_rows(input), gate_weight, up_weight, parse_activation(activation), limit,
           keep_preactivations ? gate : none, keep_preactivations ? up : none, output);
  return {output, gate, up};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& gate_weight,
    const at::Tensor& up_weight, const at::Tensor& kept_gate, const at::Tensor& kept_up,
    std::string_view activation, double limit, bool /*keep_preactivations*/,
    std::array<bool, 3> output_mask) {
  const auto act = parse_activation(activation);
  const auto x = as_rows(input);
  const int64_t rows = x.size(0), columns = gate_weight.size(0);
  const auto dy = grad_output->contiguous();
  at::Tensor gate = kept_gate.contiguous(), up = kept_up.contiguous();
  if (gate.numel() != dy.numel() || up.numel() != dy.numel()) {
    // The forward ran without a gradient in view: make the pre-activations again.
    gate = at::empty({rows, columns}, x.options());
    up = at::empty({rows, columns}, x.options());
    glu_into(x, gate_weight, up_weight, act, limit, gate, up, at::Tensor());
  }
  at::Tensor dgate, dup;
  if (output_mask[0] || output_mask[1]) dgate = at::empty({rows, columns}, x.options());
  if (output_mask[0] || output_mask[2]) dup = at::empty({rows, columns}, x.options());
  const GluGradient arguments{
      data(dy), data(gate),  data(up), mutable_data(dgate), mutable_data(dup), dy.numel(),
      act,      dtype_of(x), limit};
  FUSEDOPS_CALL_ISA(glu_gradient, arguments);
  at::Tensor dx, dgate_weight, dup_weight;
  if (output_mask[0]) {
    // dgate * gate_weight + dup * up_weight, rounded once.
    auto call = product_of(rows, x.size(1), columns, matrix(dgate), matrix(gate_weight), x);
    const Factors extra{matrix(dup), matrix(up_weight)};
    call.extra_products = &extra;
    call.num_extra_products = 1;
    dx = multiply(call, x.options()).view(input.sizes());
  }
  if (output_mask[1]) dgate_weight = linear_grad_weight(dgate, x, gate_weight);
  if (output_mask[2]) dup_weight = linear_grad_weight(dup, x, up_weight);
  return {dx, dgate_weight, dup_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("linear_glu", forward);
  m.impl("linear_glu_backward", backward);
}

}  // namespace fusedops
