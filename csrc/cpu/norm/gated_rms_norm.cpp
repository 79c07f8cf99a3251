// Binding of gated_rms_norm on the CPU: fusedops_cpp::gated_rms_norm and gated_rms_norm_backward.
// Arguments were checked by fusedops/ops/gated_rms_norm.py.
#include "gated_rms_norm.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The tensor as rows, without a copy where the leading dimensions are evenly spaced.
at::Tensor rows_of(const at::Tensor& tensor, int64_t columns) {
  const auto rows = tensor.reshape({tensor.numel() / columns, columns});
  return columns == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

GatedRows view(const at::Tensor& rows) {
  return {data(rows), rows.stride(0)};
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& gate,
                                           const Optional& weight, int64_t groups, double eps,
                                           bool norm_before_gate, std::string_view activation) {
  auto sizes = input.sizes().vec();
  const int64_t columns = sizes.back();
  sizes.back() = groups;
  auto output = at::empty(input.sizes(), input.options());
  auto rstd = at::empty(sizes, input.options().dtype(statistics_type(input)));
  if (input.numel() == 0) return {output, rstd};
  const auto x = rows_of(input, columns), g = rows_of(gate, columns), w = dense(weight);
  const GatedNormForward arguments{.input = view(x),
                                   .gate = view(g),
                                   .weight = data(w),
                                   .output = mutable_data(output),
                                   .rstd = mutable_data(rstd),
                                   .rows = x.size(0),
                                   .groups = groups,
                                   .size = columns / groups,
                                   .eps = eps,
                                   .norm_before_gate = norm_before_gate,
                                   .is_silu = activation == "silu",
                                   .dtype = dtype_of(x),
                                   .weight_dtype = dtype_of(w.defined() ? w : x)};
  FUSEDOPS_CALL_ISA(gated_norm_forward, arguments);
  return {output, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const at::Tensor& input, const at::Tensor& gate,
    const Optional& weight, const at::Tensor& rstd, int64_t groups, double /*eps*/,
    bool norm_before_gate, std::string_view activation, c10::List<bool> output_mask) {
  const int64_t columns = input.size(-1);
  const auto w = dense(weight);
  at::Tensor dx, dgate, dweight, partials;
  if (output_mask[0]) dx = at::empty(input.sizes(), input.options());
  if (output_mask[1]) dgate = at::empty(input.sizes(), input.options());
  if (output_mask[2]) dweight = at::empty(w.sizes(), w.options());
  if (input.numel() == 0) {
    if (dweight.defined()) dweight.zero_();
    return {dx, dgate, dweight};
  }
  const auto dy = rows_of(grad_output->to(input.scalar_type()), columns);
  const auto x = rows_of(input, columns), g = rows_of(gate, columns);
  if (dweight.defined()) {
    partials = at::empty({Chunks(x.size(0)).count, columns}, x.options().dtype(statistics_type(x)));
  }
  const auto statistics = rstd.contiguous();
  const GatedNormBackward arguments{.grad_output = view(dy),
                                    .input = view(x),
                                    .gate = view(g),
                                    .weight = data(w),
                                    .rstd = data(statistics),
                                    .grad_input = mutable_data(dx),
                                    .grad_gate = mutable_data(dgate),
                                    .grad_weight = mutable_data(dweight),
                                    .partials = mutable_data(partials),
                                    .rows = x.size(0),
                                    .groups = groups,
                                    .size = columns / groups,
                                    .norm_before_gate = norm_before_gate,
                                    .is_silu = activation == "silu",
                                    .dtype = dtype_of(x),
                                    .weight_dtype = dtype_of(w.defined() ? w : x)};
  FUSEDOPS_CALL_ISA(gated_norm_backward, arguments);
  return {dx, dgate, dweight};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("gated_rms_norm", forward);
  m.impl("gated_rms_norm_backward", backward);
}

}  // namespace fusedops
