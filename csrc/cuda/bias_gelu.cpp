// Bindings of gelu and bias_gelu on CUDA: fusedops_cuda::gelu, bias_gelu and their backwards.
// Arguments were checked by fusedops/ops/gelu.py and bias_gelu.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "binding.h"
#include "gelu.h"

namespace fusedops::cuda {
namespace {

// Without bias the rows are those of the last dimension.
int64_t columns_of(const at::Tensor& x, const at::Tensor& bias) {
  return bias.defined() ? bias.numel() : x.dim() == 0 ? 1 : x.size(-1);
}

at::Tensor run_forward(const at::Tensor& input, const at::Tensor& bias,
                       std::string_view approximate) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  const auto b = dense(bias);
  auto output = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    const int64_t columns = columns_of(x, b);
    const BiasGeluForward arguments{.input = data(x),
                                    .bias = data(b),
                                    .output = mutable_data(output),
                                    .rows = x.numel() / columns,
                                    .columns = columns,
                                    .activation = gelu_variant(approximate),
                                    .dtype = dtype_of(x),
                                    .bias_dtype = dtype_of(b.defined() ? b : x)};
    C10_CUDA_CHECK(bias_gelu_forward(arguments, c10::cuda::getCurrentCUDAStream()));
  }
  return output;
}

std::tuple<at::Tensor, at::Tensor> run_backward(const std::optional<at::Tensor>& grad_output,
                                                const at::Tensor& input, const at::Tensor& bias,
                                                std::string_view approximate, bool wants_input,
                                                bool wants_bias) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  const auto b = dense(bias);
  const auto dy = gradient(grad_output, x);
  at::Tensor dx, dbias, partials;
  if (wants_input) dx = at::empty(x.sizes(), x.options());
  if (wants_bias) dbias = at::empty(b.sizes(), b.options());
  if (x.numel() == 0) {
    if (dbias.defined()) dbias.zero_();
    return {dx, dbias};
  }
  if (!dx.defined() && !dbias.defined()) return {};
  const int64_t columns = columns_of(x, b);
  const int64_t rows = x.numel() / columns;
  if (dbias.defined()) {
    partials = at::empty({bias_gelu_partials(rows, columns, dtype_of(x)), columns},
                         x.options().dtype(statistics_type(x)));
  }
  const BiasGeluBackward arguments{.grad_output = data(dy),
                                   .input = data(x),
                                   .bias = data(b),
                                   .grad_input = mutable_data(dx),
                                   .grad_bias = mutable_data(dbias),
                                   .partials = mutable_data(partials),
                                   .rows = rows,
                                   .columns = columns,
                                   .activation = gelu_variant(approximate),
                                   .dtype = dtype_of(x),
                                   .bias_dtype = dtype_of(b.defined() ? b : x)};
  C10_CUDA_CHECK(bias_gelu_backward(arguments, c10::cuda::getCurrentCUDAStream()));
  return {dx, dbias};
}

at::Tensor gelu(const at::Tensor& input, std::string_view approximate) {
  return run_forward(input, {}, approximate);
}

at::Tensor gelu_backward(const std::optional<at::Tensor>& grad_output, const at::Tensor& input,
                         std::string_view approximate, c10::List<bool> output_mask) {
  return std::get<0>(run_backward(grad_output, input, {}, approximate, output_mask[0], false));
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const std::optional<at::Tensor>& grad_output,
                                                      const at::Tensor& input,
                                                      const at::Tensor& bias,
                                                      std::string_view approximate,
                                                      c10::List<bool> output_mask) {
  return run_backward(grad_output, input, bias, approximate, output_mask[0], output_mask[1]);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  m.impl("gelu", gelu);
  m.impl("gelu_backward", gelu_backward);
  m.impl("bias_gelu", run_forward);
  m.impl("bias_gelu_backward", bias_gelu_backward);
}

}  // namespace fusedops::cuda
