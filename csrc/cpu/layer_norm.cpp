// Binding of layer_norm on the CPU: fusedops_cpp::layer_norm and fusedops_cpp::layer_norm_backward.
// Arguments were checked by fusedops/ops/layer_norm.py.
#include "layer_norm.h"

#include <array>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../common/binding.h"
#include "../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& input,
                                                       at::IntArrayRef normalized_shape,
                                                       const Optional& weight, const Optional& bias,
                                                       double eps) {
  const auto x = input.contiguous();
  auto w = dense(weight);
  auto b = dense(bias);
  const auto leading = x.sizes().slice(0, x.dim() - normalized_shape.size());
  const auto statistics = x.options().dtype(statistics_type(x));
  auto output = at::empty(x.sizes(), x.options());
  auto mean = at::empty(leading, statistics);
  auto rstd = at::empty(leading, statistics);
  const auto parameter_dtype = align_parameters(x, w, b);
  const int64_t rows = c10::multiply_integers(leading);
  if (x.numel() > 0) {
    const LayerNormForward arguments{data(x),
                                     data(w),
                                     data(b),
                                     mutable_data(output),
                                     mutable_data(mean),
                                     mutable_data(rstd),
                                     rows,
                                     x.numel() / rows,
                                     eps,
                                     dtype_of(x),
                                     parameter_dtype};
    FUSEDOPS_CALL_ISA(layer_norm_forward, arguments);
  }
  return {output, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const Optional& weight,
    const at::Tensor& mean, const at::Tensor& rstd, at::IntArrayRef normalized_shape, double eps,
    c10::List<bool> output_mask) {
  const auto x = input.contiguous();
  const auto dy = grad_output->to(x.scalar_type()).contiguous();
  auto w = dense(weight);
  at::Tensor no_bias;
  const auto parameter_dtype = align_parameters(x, w, no_bias);
  const int64_t rows = mean.numel();
  const auto parameter_options = x.options().dtype(w.defined() ? w.scalar_type() : x.scalar_type());
  at::Tensor dx, dweight, dbias, partials;
  if (output_mask[0]) dx = at::empty(x.sizes(), x.options());
  if (output_mask[1]) dweight = at::empty(normalized_shape, parameter_options);
  if (output_mask[2]) dbias = at::empty(normalized_shape, parameter_options);
  if (x.numel() == 0) {
    if (dweight.defined()) dweight.zero_();
    if (dbias.defined()) dbias.zero_();
    return {dx, dweight, dbias};
  }
  const int64_t columns = x.numel() / rows;
  if (dweight.defined() || dbias.defined()) {
    partials = at::empty({Chunks(rows).count, 2, columns}, x.options().dtype(statistics_type(x)));
  }
  const auto mean_dense = mean.contiguous();
  const auto rstd_dense = rstd.contiguous();
  const LayerNormBackward arguments{data(dy),
                                    data(x),
                                    data(w),
                                    data(mean_dense),
                                    data(rstd_dense),
                                    mutable_data(dx),
                                    mutable_data(dweight),
                                    mutable_data(dbias),
                                    mutable_data(partials),
                                    rows,
                                    columns,
                                    dtype_of(x),
                                    parameter_dtype};
  FUSEDOPS_CALL_ISA(layer_norm_backward, arguments);
  return {dx, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("layer_norm", forward);
  m.impl("layer_norm_backward", backward);
}

}  // namespace fusedops
