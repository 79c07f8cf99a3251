// Binding of gelu on the CPU: fusedops_cpp::gelu and fusedops_cpp::gelu_backward.
// Arguments were checked by fusedops/ops/gelu.py.
#include "gelu.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"

namespace fusedops {
namespace {

at::Tensor run(const at::Tensor& grad_output, const at::Tensor& input,
               std::string_view approximate) {
  const auto x = input.contiguous();
  auto output = at::empty(x.sizes(), x.options());
  if (x.numel() > 0) {
    const Gelu arguments{data(grad_output),         data(x),    mutable_data(output), x.numel(),
                         gelu_variant(approximate), dtype_of(x)};
    FUSEDOPS_CALL_ISA(gelu, arguments);
  }
  return output;
}

at::Tensor forward(const at::Tensor& input, std::string_view approximate) {
  return run({}, input, approximate);
}

at::Tensor backward(const std::optional<at::Tensor>& grad_output, const at::Tensor& input,
                    std::string_view approximate, c10::List<bool> output_mask) {
  if (!output_mask[0]) return {};
  return run(grad_output.value().to(input.scalar_type()).contiguous(), input, approximate);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("gelu", forward);
  m.impl("gelu_backward", backward);
}

}  // namespace fusedops
