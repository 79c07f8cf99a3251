// Binding of mlp on the CPU: fusedops_cpp::mlp and fusedops_cpp::mlp_backward. The kernels are
// those of linear_act. Arguments were checked by fusedops/ops/mlp.py.
//
// Forward: two products for a block of rows at a time, so that the hidden layer of a block is still
// in the shared cache when it is read. Backward: the products that it must have (four, and one more
// where the pre-activation was not kept); the activation, its derivative and the gradient of the
// first bias are made on the tiles of the hidden gradient.
#include <algorithm>
#include <array>

#include <torch/library.h>

#include "linear_binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// Bytes of the hidden layer that are made before they are read.
constexpr int64_t kHiddenBytes = int64_t{16} << 20;

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& w1,
                                           const Optional& b1, const at::Tensor& w2,
                                           const Optional& b2, std::string_view activation,
                                           bool keep_preactivation) {
  const auto act = parse_activation(activation);
  const auto x = as_rows(input);
  const auto bias1 = dense(b1), bias2 = dense(b2);
  const int64_t rows = x.size(0), hidden_size = w1.size(0);
  auto shape = input.sizes().vec();
  shape.back() = w2.size(0);
  auto output = at::empty(shape, input.options());
  const auto y = output.view({rows, w2.size(0)});
  shape.back() = hidden_size;
  auto kept = at::empty(keep_preactivation ? at::IntArrayRef(shape) : at::IntArrayRef({0}),
                        input.options());
  const int64_t row_bytes = std::max<int64_t>(1, hidden_size * input.element_size());
  const int64_t block =
      std::clamp<int64_t>(kHiddenBytes / row_bytes, 256, std::max<int64_t>(256, rows));
  const auto z = keep_preactivation ? kept.view({rows, hidden_size}) : at::Tensor();
  const auto hidden = at::empty({std::min(block, rows), hidden_size}, input.options());
  for (int64_t row = 0; row < rows; row += block) {
    const int64_t count = std::min(block, rows - row);
    const auto h = hidden.narrow(0, 0, count);
    linear_into(x.narrow(0, row, count), w1, bias1, act, z.defined() ? z.narrow(0, row, count) : z,
                h);
    linear_into(h, w2, bias2, Activation::identity, at::Tensor(), y.narrow(0, row, count));
  }
  return {output, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& w1, const Optional& b1,
    const at::Tensor& w2, const Optional& b2, const at::Tensor& preactivation,
    std::string_view activation, bool /*keep_preactivation*/, std::array<bool, 5> output_mask) {
  const auto act = parse_activation(activation);
  const auto x = as_rows(input);
  const auto dy = as_rows(grad_output->contiguous());
  const int64_t rows = x.size(0), hidden_size = w1.size(0), out = w2.size(0);
  const auto options = x.options();
  const auto sums = options.dtype(statistics_type(x));
  const bool wants_first = output_mask[0] || output_mask[1] || output_mask[2];
  at::Tensor dx, dw1, db1, dw2, db2;
  if (wants_first || output_mask[3]) {
    auto z = preactivation.contiguous();
    if (z.numel() != rows * hidden_size) {
      z = at::empty({rows, hidden_size}, options);
      linear_into(x, w1, dense(b1), Activation::identity, at::Tensor(), z);
    }
    at::Tensor dz, h, partials;
    if (output_mask[0] || output_mask[1]) dz = at::empty({rows, hidden_size}, options);
    if (output_mask[3]) h = at::empty({rows, hidden_size}, options);
    if (output_mask[2]) {
      db1 = at::empty({hidden_size}, options);
      partials = at::empty({(rows + kLeastTileRows - 1) / kLeastTileRows, hidden_size}, sums);
    }
    const HiddenGradient arguments{product_of(rows, hidden_size, out, matrix(dy), matrix(w2), dy),
                                   data(z),
                                   mutable_data(dz),
                                   mutable_data(h),
                                   mutable_data(db1),
                                   mutable_data(partials),
                                   act};
    FUSEDOPS_CALL_ISA(hidden_gradient, arguments);
    if (output_mask[3]) dw2 = linear_grad_weight(dy, h, w2);
    if (output_mask[0]) dx = linear_grad_input(dz, w1).view(input.sizes());
    if (output_mask[1]) dw1 = linear_grad_weight(dz, x, w1);
  }
  if (output_mask[4]) {
    db2 = at::empty({out}, options);
    const auto partials = at::empty({Chunks(rows).count, out}, sums);
    const ActivationGradient arguments{data(dy),
                                       nullptr,
                                       nullptr,
                                       mutable_data(db2),
                                       mutable_data(partials),
                                       rows,
                                       out,
                                       Activation::identity,
                                       dtype_of(x)};
    FUSEDOPS_CALL_ISA(activation_gradient, arguments);
  }
  return {dx, dw1, db1, dw2, db2};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("mlp", forward);
  m.impl("mlp_backward", backward);
}

}  // namespace fusedops
