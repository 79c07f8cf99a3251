// Binding of bias_gelu on the CPU: fusedops_cpp::bias_gelu and fusedops_cpp::bias_gelu_backward.
// Arguments were checked by fusedops/ops/bias_gelu.py.
#include "bias_gelu.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

at::Tensor forward(const at::Tensor& input, const at::Tensor& bias, std::string_view approximate) {
  const auto x = input.contiguous();
  const auto b = bias.contiguous();
  auto output = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    const int64_t columns = b.numel();
    const BiasGeluForward arguments{data(x),
                                    data(b),
                                    mutable_data(output),
                                    x.numel() / columns,
                                    columns,
                                    gelu_variant(approximate),
                                    dtype_of(x),
                                    dtype_of(b)};
    FUSEDOPS_CALL_ISA(bias_gelu_forward, arguments);
  }
  return output;
}

std::tuple<at::Tensor, at::Tensor> backward(const std::optional<at::Tensor>& grad_output,
                                            const at::Tensor& input, const at::Tensor& bias,
                                            std::string_view approximate,
                                            c10::List<bool> output_mask) {
  const auto x = input.contiguous();
  const auto b = bias.contiguous();
  const auto dy = grad_output->to(x.scalar_type()).contiguous();
  at::Tensor dx, dbias, partials;
  if (output_mask[0]) dx = at::empty(x.sizes(), x.options());
  if (output_mask[1]) dbias = at::empty(b.sizes(), b.options());
  if (x.numel() == 0) {
    if (dbias.defined()) dbias.zero_();
    return {dx, dbias};
  }
  const int64_t columns = b.numel();
  const int64_t rows = x.numel() / columns;
  if (dbias.defined()) {
    partials = at::empty({Chunks(rows).count, columns}, x.options().dtype(statistics_type(x)));
  }
  if (dx.defined() || dbias.defined()) {
    const BiasGeluBackward arguments{data(dy),
                                     data(x),
                                     data(b),
                                     mutable_data(dx),
                                     mutable_data(dbias),
                                     mutable_data(partials),
                                     rows,
                                     columns,
                                     gelu_variant(approximate),
                                     dtype_of(x),
                                     dtype_of(b)};
    FUSEDOPS_CALL_ISA(bias_gelu_backward, arguments);
  }
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("bias_gelu", forward);
  m.impl("bias_gelu_backward", backward);
}

}  // namespace fusedops
