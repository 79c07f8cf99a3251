// See norm_binding.h.
#include "norm_binding.h"

#include <ATen/ops/empty.h>

#include "../common/binding.h"
#include "../common/parallel.h"
#include "norm.h"

namespace fusedops {

using Optional = std::optional<at::Tensor>;

NormKind rms_kind(double weight_offset, std::string_view rounding) {
  const bool first = rounding == "hf";
  TORCH_CHECK_VALUE(first || rounding == "torch", "rounding must be torch or hf, got ", rounding);
  return {.centred = false, .weight_offset = weight_offset, .round_before_weight = first};
}

NormResults run_norm(const NormKind& kind, const at::Tensor& input, const Optional& residual,
                     at::IntArrayRef normalized_shape, const Optional& weight, const Optional& bias,
                     const Optional& seed, double eps, double dropout_p) {
  const auto x = input.contiguous();
  const auto r = dense(residual);
  const auto& rows_of = r.defined() ? r : x;  // what is normalised has its sizes and dtype
  auto w = dense(weight);
  auto b = dense(bias);
  const auto leading = rows_of.sizes().slice(0, rows_of.dim() - normalized_shape.size());
  const auto options = rows_of.options();
  const auto statistics = options.dtype(statistics_type(rows_of));
  const bool promotes = kind.round_before_weight && w.defined();
  NormResults results{
      .output = at::empty(rows_of.sizes(), promotes ? options.dtype(w.scalar_type()) : options),
      .summed = r.defined() ? at::empty(r.sizes(), options) : at::Tensor(),
      .mean = kind.centred ? at::empty(leading, statistics) : at::Tensor(),
      .rstd = at::empty(leading, statistics)};
  const auto parameter_dtype = align_parameters(rows_of, w, b);
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
                              .eps = eps,
                              .weight_offset = kind.weight_offset,
                              .round_before_weight = kind.round_before_weight,
                              .dropout = dropout_of(seed, dropout_p),
                              .input_dtype = dtype_of(x),
                              .dtype = dtype_of(rows_of),
                              .parameter_dtype = parameter_dtype,
                              .output_dtype = dtype_of(results.output)};
  FUSEDOPS_CALL_ISA(norm_forward, arguments);
  return results;
}

NormGradients run_norm_backward(const NormKind& kind, const Optional& grad_output,
                                const Optional& grad_summed, const at::Tensor& normalized,
                                const Optional& weight, const Optional& mean,
                                const at::Tensor& rstd, const Optional& seed,
                                at::IntArrayRef normalized_shape, double dropout_p,
                                at::ScalarType input_dtype, std::array<bool, 4> wanted) {
  const auto x = normalized.contiguous();
  auto dy = dense(grad_output);
  if (dy.defined()) dy = dy.to(x.scalar_type());
  const auto ds = dense(grad_summed);
  auto w = dense(weight);
  at::Tensor no_bias;
  const auto parameter_dtype = align_parameters(x, w, no_bias);
  const auto dropout = dropout_of(seed, dropout_p);
  const auto parameter_options = x.options().dtype(w.defined() ? w.scalar_type() : x.scalar_type());
  NormGradients grads;
  const bool differs = !wanted[1] || dropout.active() || input_dtype != x.scalar_type();
  if (wanted[0] && differs) {
    grads.input = at::empty(x.sizes(), x.options().dtype(kernel_type(input_dtype, x)));
  }
  if (wanted[1]) grads.residual = at::empty(x.sizes(), x.options());
  if (wanted[2] && dy.defined()) grads.weight = at::empty(normalized_shape, parameter_options);
  if (wanted[3] && dy.defined()) grads.bias = at::empty(normalized_shape, parameter_options);
  if (x.numel() == 0) {
    if (grads.weight.defined()) grads.weight.zero_();
    if (grads.bias.defined()) grads.bias.zero_();
  } else {
    const int64_t rows = rstd.numel();
    const int64_t columns = x.numel() / rows;
    at::Tensor partials;
    if (grads.weight.defined() || grads.bias.defined()) {
      partials = at::empty({Chunks(rows).count, 2, columns}, x.options().dtype(statistics_type(x)));
    }
    const auto mean_dense = dense(mean);
    const auto rstd_dense = rstd.contiguous();
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
        .weight_offset = kind.weight_offset,
        .dropout = dropout,
        .input_dtype = grads.input.defined() ? dtype_of(grads.input) : dtype_of(x),
        .dtype = dtype_of(x),
        .parameter_dtype = parameter_dtype};
    FUSEDOPS_CALL_ISA(norm_backward, arguments);
  }
  if (grads.input.defined()) grads.input = grads.input.to(input_dtype);
  return grads;
}

}  // namespace fusedops
