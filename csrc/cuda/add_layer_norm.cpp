// Binding of add_layer_norm on CUDA: fusedops_cuda::add_layer_norm and its backward. Arguments were
// checked by fusedops/ops/add_layer_norm.py.
#include "add_layer_norm.h"

#include <cmath>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "binding.h"
#include "layer_norm.h"

namespace fusedops::cuda {
namespace {

using Optional = std::optional<at::Tensor>;

// `seed` is dense; it must outlive the launch.
DropoutArguments dropout_arguments(const at::Tensor& seed, double p) {
  const auto threshold = static_cast<uint64_t>(std::nearbyint(p * 4294967296.0));
  const bool drawn = threshold != 0 && threshold >> 32 == 0;
  TORCH_INTERNAL_ASSERT(!drawn || seed.defined());
  return {.seed = drawn ? seed.const_data_ptr<int64_t>() : nullptr,
          .threshold = threshold,
          .scale = p < 1.0 ? 1.0 / (1.0 - p) : 1.0};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& input, const at::Tensor& residual, at::IntArrayRef normalized_shape,
    const Optional& weight, const Optional& bias, const Optional& seed, double eps,
    double dropout_p, at::ScalarType /*input_dtype*/) {
  const c10::cuda::CUDAGuard guard(residual.device());
  const auto x = input.contiguous();
  const auto stream = residual.contiguous();
  auto w = dense(weight);
  auto b = dense(bias);
  const auto seed_dense = dense(seed);
  const auto leading = leading_sizes(stream, normalized_shape);
  const auto statistics = stream.options().dtype(statistics_type(stream));
  auto normed = at::empty(stream.sizes(), stream.options());
  auto summed = at::empty(stream.sizes(), stream.options());
  auto mean = at::empty(leading, statistics);
  auto rstd = at::empty(leading, statistics);
  const auto parameter_type = align_parameters(stream, w, b);
  const int64_t rows = c10::multiply_integers(leading);
  if (stream.numel() > 0) {
    const AddLayerNormForward arguments{.input = data(x),
                                        .residual = data(stream),
                                        .weight = data(w),
                                        .bias = data(b),
                                        .normed = mutable_data(normed),
                                        .summed = mutable_data(summed),
                                        .mean = mutable_data(mean),
                                        .rstd = mutable_data(rstd),
                                        .rows = rows,
                                        .columns = stream.numel() / rows,
                                        .eps = eps,
                                        .dropout = dropout_arguments(seed_dense, dropout_p),
                                        .dtype = type_of(stream),
                                        .parameter_dtype = parameter_type,
                                        .input_dtype = type_of(x)};
    C10_CUDA_CHECK(add_layer_norm_forward(arguments, c10::cuda::getCurrentCUDAStream()));
  }
  return {normed, summed, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_normed, const Optional& grad_summed, const at::Tensor& summed,
    const Optional& weight, const at::Tensor& mean, const at::Tensor& rstd, const Optional& seed,
    at::IntArrayRef normalized_shape, double /*eps*/, double dropout_p, at::ScalarType input_dtype,
    c10::List<bool> output_mask) {
  const c10::cuda::CUDAGuard guard(summed.device());
  const auto sum = summed.contiguous();
  const auto dnormed = gradient(grad_normed, sum);
  const auto dsummed = gradient(grad_summed, sum);
  const auto seed_dense = dense(seed);
  const auto dropout = dropout_arguments(seed_dense, dropout_p);
  auto w = dense(weight);
  at::Tensor no_bias;
  const auto parameter_type = align_parameters(sum, w, no_bias);
  const auto parameter = sum.options().dtype(w.defined() ? w.scalar_type() : sum.scalar_type());
  // As _wanted() in fusedops/ops/add_layer_norm.py: not what is the same, not what is nothing.
  const bool same = output_mask[1] && dropout.threshold == 0 && input_dtype == sum.scalar_type();
  at::Tensor dinput, dresidual, dweight, dbias, partials;
  if (output_mask[0] && !same) dinput = at::empty(sum.sizes(), sum.options().dtype(input_dtype));
  if (output_mask[1]) dresidual = at::empty(sum.sizes(), sum.options());
  if (output_mask[2] && dnormed.defined()) dweight = at::empty(normalized_shape, parameter);
  if (output_mask[3] && dnormed.defined()) dbias = at::empty(normalized_shape, parameter);
  if (sum.numel() == 0) {
    if (dweight.defined()) dweight.zero_();
    if (dbias.defined()) dbias.zero_();
    return {dinput, dresidual, dweight, dbias};
  }
  const int64_t rows = mean.numel();
  const int64_t columns = sum.numel() / rows;
  if (dweight.defined() || dbias.defined()) {
    partials = at::empty({2, partial_rows(rows, columns, type_of(sum)), columns},
                         sum.options().dtype(statistics_type(sum)));
  }
  const auto mean_dense = mean.contiguous();
  const auto rstd_dense = rstd.contiguous();
  const AddLayerNormBackward arguments{
      .grad_normed = data(dnormed),
      .grad_summed = data(dsummed),
      .summed = data(sum),
      .weight = data(w),
      .mean = data(mean_dense),
      .rstd = data(rstd_dense),
      .grad_input = mutable_data(dinput),
      .grad_residual = mutable_data(dresidual),
      .grad_weight = mutable_data(dweight),
      .grad_bias = mutable_data(dbias),
      .partials = mutable_data(partials),
      .rows = rows,
      .columns = columns,
      .dropout = dropout,
      .dtype = type_of(sum),
      .parameter_dtype = parameter_type,
      .input_dtype = dinput.defined() ? type_of(dinput) : type_of(sum)};
  C10_CUDA_CHECK(add_layer_norm_backward(arguments, c10::cuda::getCurrentCUDAStream()));
  return {dinput, dresidual, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  m.impl("add_layer_norm", forward);
  m.impl("add_layer_norm_backward", backward);
}

}  // namespace fusedops::cuda
