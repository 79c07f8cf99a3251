// Binding of gelu on CUDA: fusedops_cuda::gelu and fusedops_cuda::gelu_backward. Arguments were
// checked by fusedops/ops/gelu.py.
#include "gelu.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "binding.h"

namespace fusedops::cuda {
namespace {

at::Tensor run(const at::Tensor& grad_output, const at::Tensor& input,
               std::string_view approximate) {
  const auto x = input.contiguous();
  auto output = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    const Gelu arguments{.grad_output = data(grad_output),
                         .input = data(x),
                         .output = mutable_data(output),
                         .count = x.numel(),
                         .activation = gelu_variant(approximate),
                         .dtype = type_of(x)};
    C10_CUDA_CHECK(gelu(arguments, c10::cuda::getCurrentCUDAStream()));
  }
  return output;
}

at::Tensor forward(const at::Tensor& input, std::string_view approximate) {
  const c10::cuda::CUDAGuard guard(input.device());
  return run({}, input, approximate);
}

at::Tensor backward(const std::optional<at::Tensor>& grad_output, const at::Tensor& input,
                    std::string_view approximate, c10::List<bool> output_mask) {
  if (!output_mask[0]) return {};
  const c10::cuda::CUDAGuard guard(input.device());
  return run(gradient(grad_output, input), input, approximate);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  m.impl("gelu", forward);
  m.impl("gelu_backward", backward);
}

}  // namespace fusedops::cuda
