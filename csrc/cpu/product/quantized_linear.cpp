// Binding of quantized_linear on the CPU. Arguments were checked by the contract in
// fusedops/ops/quantized_linear.py.
#include <array>

#include <torch/library.h>

#include "linear_binding.h"
#include "quantized_linear.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

WeightFormat parse_format(std::string_view name) {
  if (name == "int8") return WeightFormat::int8;
  if (name == "int4") return WeightFormat::int4;
  TORCH_CHECK_VALUE(name == "nf4", "format must be int8, int4 or nf4, got ", std::string(name));
  return WeightFormat::nf4;
}

// Scales in a dtype that the kernels read beside activations like `like`.
at::Tensor readable_scales(const at::Tensor& scales, const at::Tensor& like) {
  if (like.scalar_type() == at::kDouble) return scales.to(at::kDouble).contiguous();
  if (scales.scalar_type() == at::kBFloat16) return scales.contiguous();
  return scales.to(at::kFloat).contiguous();
}

QuantizedWeight weight_of(const at::Tensor& codes, const at::Tensor& scales, int64_t in_features,
                          int64_t out_features, int64_t group, std::string_view format) {
  const auto kind = parse_format(format);
  const int64_t lines = codes.size(1), depth = lines * line_depth(kind);
  return {codes.const_data_ptr<uint8_t>(),
          data(scales),
          dtype_of(scales),
          kind,
          in_features,
          out_features,
          lines,
          scales.size(1),
          group == 0 ? std::max<int64_t>(depth, 1) : group};
}

at::Tensor forward(const at::Tensor& input, const at::Tensor& qweight, const at::Tensor& scales,
                   const Optional& bias, int64_t in_features, int64_t out_features,
                   std::string_view format, int64_t group) {
  auto shape = input.sizes().vec();
  shape.back() = out_features;
  auto output = at::empty(shape, input.options());
  const auto x = as_rows(input), added = dense(bias), codes = qweight.contiguous();
  const auto factors = readable_scales(scales, input);
  const QuantizedForward arguments{
      weight_of(codes, factors, in_features, out_features, group, format),
      matrix(x),
      data(added),
      mutable_data(output),
      x.size(0),
      dtype_of(input)};
  FUSEDOPS_CALL_ISA(quantized_linear_forward, arguments);
  return output;
}

std::tuple<at::Tensor, at::Tensor> backward(const Optional& grad_output, const at::Tensor& qweight,
                                            const at::Tensor& scales, int64_t in_features,
                                            int64_t out_features, std::string_view format,
                                            int64_t group, std::array<bool, 2> output_mask) {
  const auto grad = grad_output->contiguous(), rows = as_rows(grad);
  at::Tensor grad_input, grad_bias;
  if (output_mask[0]) {
    auto shape = grad.sizes().vec();
    shape.back() = in_features;
    grad_input = at::empty(shape, grad.options());
    const auto codes = qweight.contiguous(), factors = readable_scales(scales, grad);
    const QuantizedGradient arguments{
        weight_of(codes, factors, in_features, out_features, group, format), data(rows),
        mutable_data(grad_input), rows.size(0), dtype_of(grad)};
    FUSEDOPS_CALL_ISA(quantized_linear_gradient, arguments);
  }
  if (output_mask[1]) {
    grad_bias = at::empty({out_features}, grad.options());
    auto partials = at::empty({Chunks(rows.size(0)).count, out_features},
                              grad.options().dtype(statistics_type(grad)));
    const ActivationGradient arguments{data(rows),
                                       nullptr,
                                       nullptr,
                                       mutable_data(grad_bias),
                                       mutable_data(partials),
                                       rows.size(0),
                                       out_features,
                                       Activation::identity,
                                       dtype_of(grad)};
    FUSEDOPS_CALL_ISA(activation_gradient, arguments);
  }
  return {grad_input, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("quantized_linear", forward);
  m.impl("quantized_linear_backward", backward);
}

}  // namespace fusedops
