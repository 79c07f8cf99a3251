// Binding of bias_gelu on CUDA: fusedops_cuda::bias_gelu and fusedops_cuda::bias_gelu_backward.
// Arguments were checked by fusedops/ops/bias_gelu.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bias_gelu.h"
#include "binding.h"

namespace fusedops::cuda {
namespace {

at::Tensor forward(const at::Tensor& input, const at::Tensor& bias, std::string_view approximate) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  const auto b = bias.contiguous();
  auto output = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    const BiasGeluForward arguments{.input = data(x),
                                    .bias = data(b),
                                    .output = mutable_data(output),
                                    .rows = x.numel() / b.numel(),
                                    .columns = b.numel(),
                                    .activation = gelu_variant(approximate),
                                    .dtype = dtype_of(x),
                                    .bias_dtype = dtype_of(b)};
    C10_CUDA_CHECK(bias_gelu_forward(arguments, c10::cuda::getCurrentCUDAStream()));
  }
  return output;
}

std::tuple<at::Tensor, at::Tensor> backward(const std::optional<at::Tensor>& grad_output,
                                            const at::Tensor& input, const at::Tensor& bias,
                                            std::string_view approximate,
                                            c10::List<bool> output_mask) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  const auto b = bias.contiguous();
  const auto dy = gradient(grad_output, x);
  at::Tensor dx, dbias, partials;
  if (output_mask[0]) dx = at::empty(x.sizes(), x.options());
  if (output_mask[1]) dbias = at::empty(b.sizes(), b.options());
  if (x.numel() == 0) {
    if (dbias.defined()) dbias.zero_();
    return {dx, dbias};
  }
  if (!dx.defined() && !dbias.defined()) return {};
  const int64_t columns = b.numel();
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
                                   .bias_dtype = dtype_of(b)};
  C10_CUDA_CHECK(bias_gelu_backward(arguments, c10::cuda::getCurrentCUDAStream()));
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  m.impl("bias_gelu", forward);
  m.impl("bias_gelu_backward", backward);
}

}  // namespace fusedops::cuda
