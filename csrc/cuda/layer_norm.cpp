// Binding of layer_norm on CUDA: fusedops_cuda::layer_norm and fusedops_cuda::layer_norm_backward.
// Arguments were checked by fusedops/ops/layer_norm.py.
#include "layer_norm.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "binding.h"

namespace fusedops::cuda {
namespace {

using Optional = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& input,
                                                       at::IntArrayRef normalized_shape,
                                                       const Optional& weight, const Optional& bias,
                                                       double eps) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  auto w = dense(weight);
  auto b = dense(bias);
  const auto leading = leading_sizes(x, normalized_shape);
  const auto statistics = x.options().dtype(statistics_type(x));
  auto output = at::empty(x.sizes(), x.options());
  auto mean = at::empty(leading, statistics);
  auto rstd = at::empty(leading, statistics);
  const auto parameter_type = align_parameters(x, w, b);
  const int64_t rows = c10::multiply_integers(leading);
  if (x.numel() > 0) {
    const LayerNormForward arguments{.input = data(x),
                                     .weight = data(w),
                                     .bias = data(b),
                                     .output = mutable_data(output),
                                     .mean = mutable_data(mean),
                                     .rstd = mutable_data(rstd),
                                     .rows = rows,
                                     .columns = x.numel() / rows,
                                     .eps = eps,
                                     .dtype = type_of(x),
                                     .parameter_dtype = parameter_type};
    C10_CUDA_CHECK(layer_norm_forward(arguments, c10::cuda::getCurrentCUDAStream()));
  }
  return {output, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const Optional& weight,
    const at::Tensor& mean, const at::Tensor& rstd, at::IntArrayRef normalized_shape,
    double /*eps*/, c10::List<bool> output_mask) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  const auto dy = gradient(grad_output, x);
  auto w = dense(weight);
  at::Tensor no_bias;
  const auto parameter_type = align_parameters(x, w, no_bias);
  const auto parameter = x.options().dtype(w.defined() ? w.scalar_type() : x.scalar_type());
  at::Tensor dx, dweight, dbias, partials;
  if (output_mask[0]) dx = at::empty(x.sizes(), x.options());
  if (output_mask[1]) dweight = at::empty(normalized_shape, parameter);
  if (output_mask[2]) dbias = at::empty(normalized_shape, parameter);
  if (x.numel() == 0) {
    if (dweight.defined()) dweight.zero_();
    if (dbias.defined()) dbias.zero_();
    return {dx, dweight, dbias};
  }
  const int64_t rows = mean.numel();
  const int64_t columns = x.numel() / rows;
  if (dweight.defined() || dbias.defined()) {
    partials = at::empty({2, partial_rows(rows, columns, type_of(x)), columns},
                         x.options().dtype(statistics_type(x)));
  }
  const auto mean_dense = mean.contiguous();
  const auto rstd_dense = rstd.contiguous();
  const LayerNormBackward arguments{.grad_output = data(dy),
                                    .input = data(x),
                                    .weight = data(w),
                                    .mean = data(mean_dense),
                                    .rstd = data(rstd_dense),
                                    .grad_input = mutable_data(dx),
                                    .grad_weight = mutable_data(dweight),
                                    .grad_bias = mutable_data(dbias),
                                    .partials = mutable_data(partials),
                                    .rows = rows,
                                    .columns = columns,
                                    .dtype = type_of(x),
                                    .parameter_dtype = parameter_type};
  C10_CUDA_CHECK(layer_norm_backward(arguments, c10::cuda::getCurrentCUDAStream()));
  return {dx, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  m.impl("layer_norm", forward);
  m.impl("layer_norm_backward", backward);
}

}  // namespace fusedops::cuda
