// Bindings of the norms on the CPU: fusedops_cpp::layer_norm, rms_norm, add_layer_norm,
// add_rms_norm and their backwards; see common/norm_binding.h.
#include "norm.h"

#include <ATen/ops/empty.h>

#include "../../common/binding.h"
#include "../../common/norm_binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

NormResults run_norm(const NormInputs& in) {
  const auto x = in.input.contiguous();
  const auto r = dense(in.residual);
  const auto& rows_of = r.defined() ? r : x;  // what is normalised has its sizes and dtype
  auto w = dense(in.weight);
  auto b = dense(in.bias);
  const auto leading = rows_of.sizes().slice(0, rows_of.dim() - in.normalized_shape.size());
  const auto options = rows_of.options();
  const auto statistics = options.dtype(statistics_type(rows_of));
  const bool promotes = in.kind.round_before_weight && w.defined();
  NormResults results{
      .output = at::empty(rows_of.sizes(), promotes ? options.dtype(w.scalar_type()) : options),
      .summed = r.defined() ? at::empty(r.sizes(), options) : at::Tensor(),
      .mean = in.kind.centred ? at::empty(leading, statistics) : at::Tensor(),
      .rstd = at::empty(leading, statistics)};
  const auto parameter_dtype = align_parameters(rows_of, w, b);
  if (rows_of.numel() == 0) return results;
  const int64_t rows = results.rstd.numel();
  const auto seed = dense(in.seed);
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
                              .dropout = row_dropout_of(seed, in.dropout_p),
                              .input_dtype = dtype_of(x),
                              .dtype = dtype_of(rows_of),
                              .parameter_dtype = parameter_dtype,
                              .output_dtype = dtype_of(results.output)};
  FUSEDOPS_CALL_ISA(norm_forward, arguments);
  return results;
}

NormGradients run_norm_backward(const NormBackwardInputs& in) {
  const auto x = normalized_of(in);
  const auto dy = gradient(in.grad_output, x);
  const auto ds = gradient(in.grad_summed, x);
  auto w = dense(in.weight);
  at::Tensor no_bias;
  const auto parameter_dtype = align_parameters(x, w, no_bias);
  const auto seed = dense(in.seed);
  const auto dropout = row_dropout_of(seed, in.dropout_p);
  const auto dtype = in.normalized.scalar_type();
  const auto parameter_options = x.options().dtype(w.defined() ? w.scalar_type() : dtype);
  NormGradients grads;
  const bool differs = !in.wanted[1] || dropout.active() || in.input_dtype != dtype;
  if (in.wanted[0] && differs) {
    grads.input = at::empty(x.sizes(), x.options().dtype(in.input_dtype));
  }
  if (in.wanted[1]) grads.residual = at::empty(x.sizes(), x.options());
  if (in.wanted[2] && dy.defined())
    grads.weight = at::empty(in.normalized_shape, parameter_options);
  if (in.wanted[3] && dy.defined()) grads.bias = at::empty(in.normalized_shape, parameter_options);
  if (x.numel() == 0) {
    if (grads.weight.defined()) grads.weight.zero_();
    if (grads.bias.defined()) grads.bias.zero_();
  } else {
    const int64_t rows = in.rstd.numel();
    const int64_t columns = x.numel() / rows;
    at::Tensor partials;
    if (grads.weight.defined() || grads.bias.defined()) {
      partials = at::empty({Chunks(rows).count, 2, columns}, x.options().dtype(statistics_type(x)));
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
        .input_dtype = grads.input.defined() ? dtype_of(grads.input) : dtype_of(x),
        .dtype = dtype_of(x),
        .parameter_dtype = parameter_dtype};
    FUSEDOPS_CALL_ISA(norm_backward, arguments);
  }
  if (grads.residual.defined()) grads.residual = grads.residual.to(dtype);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  NormOperators<run_norm, run_norm_backward>::implement(m);
}

}  // namespace fusedops
