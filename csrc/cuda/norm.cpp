// Bindings of the norms on CUDA: fusedops_cuda::layer_norm, rms_norm, add_layer_norm, add_rms_norm
// and their backwards; see common/norm_binding.h.
#include "norm.h"

#include <cmath>

#include <ATen/ops/empty.h>

#include "../common/norm_binding.h"
#include "binding.h"

namespace fusedops::cuda {
namespace {

// `seed` is dense; it must outlive the launch.
DropoutArguments dropout_arguments(const at::Tensor& seed, double p) {
  const auto threshold = static_cast<uint64_t>(std::nearbyint(p * 4294967296.0));
  const bool drawn = threshold != 0 && threshold >> 32 == 0;
  TORCH_INTERNAL_ASSERT(!drawn || seed.defined());
  return {.seed = drawn ? seed.const_data_ptr<int64_t>() : nullptr,
          .placed = drawn && seed.numel() > 2,
          .threshold = threshold,
          .scale = p < 1.0 ? 1.0 / (1.0 - p) : 1.0};
}

NormResults run_norm(const NormInputs& in) {
  const c10::cuda::CUDAGuard guard(in.input.device());
  const auto x = in.input.contiguous();
  const auto r = dense(in.residual);
  const auto& rows_of = r.defined() ? r : x;  // what is normalised has its sizes and dtype
  auto w = dense(in.weight);
  auto b = dense(in.bias);
  const auto seed_dense = dense(in.seed);
  const auto leading = leading_sizes(rows_of, in.normalized_shape);
  const auto options = rows_of.options();
  const auto statistics = options.dtype(statistics_type(rows_of));
  const bool promotes = in.kind.round_before_weight && w.defined();
  NormResults results{
      .output = at::empty(rows_of.sizes(), promotes ? options.dtype(w.scalar_type()) : options),
      .summed = r.defined() ? at::empty(r.sizes(), options) : at::Tensor(),
      .mean = in.kind.centred ? at::empty(leading, statistics) : at::Tensor(),
      .rstd = at::empty(leading, statistics)};
  const auto parameter_type = align_parameters(rows_of, w, b);
  if (rows_of.numel() == 0) return results;
  const int64_t rows = results.rstd.numel();
  const NormForward arguments{.input = data(x),
                              .residual = data(r),
                              .weight = data(w),
                              .bias = data(b),
                              .output = mutable_data(results.output),
                              .summed = mutable_data(results.summed),
                              .mean = mutable_data(results.mean),
                              .rstd = mutable_data(results.rstd),
                              .rows = rows,
                              .columns = rows_of.numel() / rows,
                              .eps = in.eps,
                              .weight_offset = in.kind.weight_offset,
                              .round_before_weight = in.kind.round_before_weight,
                              .dropout = dropout_arguments(seed_dense, in.dropout_p),
                              .input_dtype = type_of(x),
                              .dtype = type_of(rows_of),
                              .parameter_dtype = parameter_type,
                              .output_dtype = type_of(results.output)};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(r.defined() ? add_norm_forward(arguments, stream)
                             : norm_forward(arguments, stream));
  return results;
}

NormGradients run_norm_backward(const NormBackwardInputs& in) {
  const c10::cuda::CUDAGuard guard(in.normalized.device());
  const auto x = normalized_of(in);
  const auto dy = gradient(in.grad_output, x);
  const auto ds = gradient(in.grad_summed, x);
  const auto seed_dense = dense(in.seed);
  const auto dropout = dropout_arguments(seed_dense, in.dropout_p);
  auto w = dense(in.weight);
  at::Tensor no_bias;
  const auto parameter_type = align_parameters(x, w, no_bias);
  const auto dtype = in.normalized.scalar_type();
  const auto parameter = x.options().dtype(w.defined() ? w.scalar_type() : dtype);
  // As wanted_gradients() in fusedops/ops/_residual.py: not what is the same, not what is nothing.
  const bool same = in.wanted[1] && dropout.threshold == 0 && in.input_dtype == dtype;
  NormGradients grads;
  if (in.wanted[0] && !same) grads.input = at::empty(x.sizes(), x.options().dtype(in.input_dtype));
  if (in.wanted[1]) grads.residual = at::empty(x.sizes(), x.options());
  if (in.wanted[2] && dy.defined()) grads.weight = at::empty(in.normalized_shape, parameter);
  if (in.wanted[3] && dy.defined()) grads.bias = at::empty(in.normalized_shape, parameter);
  if (x.numel() == 0) {
    if (grads.weight.defined()) grads.weight.zero_();
    if (grads.bias.defined()) grads.bias.zero_();
    return grads;
  }
  const int64_t rows = in.rstd.numel();
  const int64_t columns = x.numel() / rows;
  at::Tensor partials;
  if (grads.weight.defined() || grads.bias.defined()) {
    partials = at::empty({2, partial_rows(rows, columns, type_of(x)), columns},
                         x.options().dtype(statistics_type(x)));
  }
  const auto mean_dense = dense(in.mean);
  const auto rstd_dense = in.rstd.contiguous();
  const NormBackward arguments{
      .grad_output = data(dy),
      .grad_summed = data(ds),
      .input = data(x),
      .weight = data(w),
      .mean = data(mean_dense),
      .rstd = data(rstd_dense),
      .grad_input = mutable_data(grads.input),
      .grad_residual = mutable_data(grads.residual),
      .grad_weight = mutable_data(grads.weight),
      .grad_bias = mutable_data(grads.bias),
      .partials = mutable_data(partials),
      .rows = rows,
      .columns = columns,
      .weight_offset = in.kind.weight_offset,
      .dropout = dropout,
      .input_dtype = grads.input.defined() ? type_of(grads.input) : type_of(x),
      .dtype = type_of(x),
      .parameter_dtype = parameter_type};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool adds = in.wanted[1] || ds.defined() || dropout.threshold != 0 ||
                    in.input_dtype != x.scalar_type() || !dy.defined();
  C10_CUDA_CHECK(adds ? add_norm_backward(arguments, stream) : norm_backward(arguments, stream));
  if (grads.residual.defined()) grads.residual = grads.residual.to(dtype);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  NormOperators<run_norm, run_norm_backward>::implement(m);
}

}  // namespace fusedops::cuda
