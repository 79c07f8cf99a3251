// The bindings of the norms, once for CPU and CUDA. csrc/cpu/norm/norm.cpp and csrc/cuda/norm.cpp
// describe their device. The contract of the op holds.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "binding.h"

namespace fusedops {

// How a norm differs from its neighbours.
struct NormKind {
  bool centred;                      // layer norm; else RMS norm
  double weight_offset = 0.0;        // added to the weight
  bool round_before_weight = false;  // and multiply in the weight's dtype
};

struct NormInputs {
  NormKind kind;
  at::Tensor input;
  std::optional<at::Tensor> residual = std::nullopt;  // none: the input is normalised
  at::IntArrayRef normalized_shape;
  std::optional<at::Tensor> weight;
  std::optional<at::Tensor> bias = std::nullopt;
  std::optional<at::Tensor> seed = std::nullopt;
  double eps;
  double dropout_p = 0.0;
};

struct NormResults {
  at::Tensor output;
  at::Tensor summed;  // undefined without residual
  at::Tensor mean;    // undefined for an RMS norm
  at::Tensor rstd;
};

struct NormBackwardInputs {
  NormKind kind;
  std::optional<at::Tensor> grad_output;
  std::optional<at::Tensor> grad_summed = std::nullopt;
  at::Tensor normalized;  // what was normalised: input or sum
  std::optional<at::Tensor> weight;
  std::optional<at::Tensor> mean = std::nullopt;
  at::Tensor rstd;
  std::optional<at::Tensor> seed = std::nullopt;
  at::IntArrayRef normalized_shape;
  double dropout_p = 0.0;
  at::ScalarType input_dtype;
  std::array<bool, 4> wanted;  // gradients of input, residual, weight and bias
};

// What was normalised, dense, as the kernels read it: in float32 where half-precision rows were
// rounded before a float32 weight, so that output and gradient have more digits than the rows.
inline at::Tensor normalized_of(const NormBackwardInputs& in) {
  const auto is_float = [](const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() && tensor->scalar_type() == at::kFloat;
  };
  const bool is_wide =
      in.normalized.element_size() == 2 && is_float(in.grad_output) && is_float(in.weight);
  return in.normalized.to(is_wide ? at::kFloat : in.normalized.scalar_type()).contiguous();
}

// The gradient of input is left out where it is that of residual (Gradient.aliases).
struct NormGradients {
  at::Tensor input;
  at::Tensor residual;
  at::Tensor weight;
  at::Tensor bias;
};

// The operators of a device. `Device` has a `Guard` that makes the device current, and static
// functions: `dropout_of` a seed and a probability, the sizes of `partials`, and `forward` and
// `backward`, which run the kernels.
template <typename Device>
struct NormOperators {
  using Tensor = at::Tensor;
  using Optional = std::optional<at::Tensor>;
  using Shape = at::IntArrayRef;
  using Mask = c10::List<bool>;
  using Tensors2 = std::tuple<Tensor, Tensor>;
  using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
  using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

  static constexpr NormKind kLayerNorm{.centred = true};

  static NormKind rms_norm_kind(double weight_offset, std::string_view rounding) {
    return {
        .centred = false, .weight_offset = weight_offset, .round_before_weight = rounding == "hf"};
  }

  static NormResults run(const NormInputs& in) {
    const typename Device::Guard guard(in.input.device());
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
    Device::forward({.input = data(x),
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
                     .dropout = Device::dropout_of(seed, in.dropout_p),
                     .input_dtype = dtype_of(x),
                     .dtype = dtype_of(rows_of),
                     .parameter_dtype = parameter_dtype,
                     .output_dtype = dtype_of(results.output)});
    return results;
  }

  static NormGradients run_backward(const NormBackwardInputs& in) {
    const typename Device::Guard guard(in.normalized.device());
    const auto x = normalized_of(in);
    const auto dy = gradient(in.grad_output, x);
    const auto ds = gradient(in.grad_summed, x);
    auto w = dense(in.weight);
    at::Tensor no_bias;
    const auto parameter_dtype = align_parameters(x, w, no_bias);
    const auto seed = dense(in.seed);
    const auto dropout = Device::dropout_of(seed, in.dropout_p);
    const bool drops = dropout.threshold != 0;
    const auto dtype = in.normalized.scalar_type();
    const auto parameter = x.options().dtype(w.defined() ? w.scalar_type() : dtype);
    // As computed_gradients() in fusedops/kernels/_norm_arguments.py.
    const bool differs = !in.wanted[1] || drops || in.input_dtype != dtype;
    NormGradients grads;
    if (in.wanted[0] && differs)
      grads.input = at::empty(x.sizes(), x.options().dtype(in.input_dtype));
    if (in.wanted[1]) grads.residual = at::empty(x.sizes(), x.options());
    if (in.wanted[2] && dy.defined()) grads.weight = at::empty(in.normalized_shape, parameter);
    if (in.wanted[3] && dy.defined()) grads.bias = at::empty(in.normalized_shape, parameter);
    if (x.numel() == 0) {
      if (grads.weight.defined()) grads.weight.zero_();
      if (grads.bias.defined()) grads.bias.zero_();
    } else {
      const int64_t rows = in.rstd.numel();
      const int64_t columns = x.numel() / rows;
      at::Tensor partials;
      if (grads.weight.defined() || grads.bias.defined()) {
        partials = at::empty(Device::partials(rows, columns, dtype_of(x)),
                             x.options().dtype(statistics_type(x)));
      }
      const auto mean = dense(in.mean);
      const auto rstd = in.rstd.contiguous();
      const bool adds = in.wanted[1] || ds.defined() || drops ||
                        in.input_dtype != x.scalar_type() || !dy.defined();
      Device::backward({.grad_output = data(dy),
                        .grad_summed = data(ds),
                        .input = data(x),
                        .weight = data(w),
                        .mean = data(mean),
                        .rstd = data(rstd),
                        .grad_input = mutable_data(grads.input),
                        .grad_residual = mutable_data(grads.residual),
                        .grad_weight = mutable_data(grads.weight),
                        .grad_bias = mutable_data(grads.bias),
                        .partials = mutable_data(partials),
                        .rows = rows,
                        .columns = columns,
                        .weight_offset = in.kind.weight_offset,
                        .dropout = dropout,
                        .input_dtype = dtype_of(grads.input.defined() ? grads.input : x),
                        .dtype = dtype_of(x),
                        .parameter_dtype = parameter_dtype},
                       adds);
    }
    if (grads.residual.defined()) grads.residual = grads.residual.to(dtype);
    return grads;
  }

  static Tensors3 layer_norm(const Tensor& input, Shape normalized_shape, const Optional& weight,
                             const Optional& bias, double eps) {
    const auto results = run({.kind = kLayerNorm,
                              .input = input,
                              .normalized_shape = normalized_shape,
                              .weight = weight,
                              .bias = bias,
                              .eps = eps});
    return {results.output, results.mean, results.rstd};
  }

  static Tensors3 layer_norm_backward(const Optional& grad_output, const Tensor& input,
                                      const Optional& weight, const Tensor& mean,
                                      const Tensor& rstd, Shape normalized_shape, double /*eps*/,
                                      Mask mask) {
    const auto grads = run_backward({.kind = kLayerNorm,
                                     .grad_output = grad_output,
                                     .normalized = input,
                                     .weight = weight,
                                     .mean = mean,
                                     .rstd = rstd,
                                     .normalized_shape = normalized_shape,
                                     .input_dtype = input.scalar_type(),
                                     .wanted = {mask[0], false, mask[1], mask[2]}});
    return {grads.input, grads.weight, grads.bias};
  }

  static Tensors2 rms_norm(const Tensor& input, Shape normalized_shape, const Optional& weight,
                           double eps, double weight_offset, std::string_view rounding) {
    const auto results = run({.kind = rms_norm_kind(weight_offset, rounding),
                              .input = input,
                              .normalized_shape = normalized_shape,
                              .weight = weight,
                              .eps = eps});
    return {results.output, results.rstd};
  }

  static Tensors2 rms_norm_backward(const Optional& grad_output, const Tensor& input,
                                    const Optional& weight, const Tensor& rstd,
                                    Shape normalized_shape, double /*eps*/, double weight_offset,
                                    std::string_view rounding, Mask mask) {
    const auto grads = run_backward({.kind = rms_norm_kind(weight_offset, rounding),
                                     .grad_output = grad_output,
                                     .normalized = input,
                                     .weight = weight,
                                     .rstd = rstd,
                                     .normalized_shape = normalized_shape,
                                     .input_dtype = input.scalar_type(),
                                     .wanted = {mask[0], false, mask[1], false}});
    return {grads.input, grads.weight};
  }

  static Tensors4 add_layer_norm(const Tensor& input, const Tensor& residual,
                                 Shape normalized_shape, const Optional& weight,
                                 const Optional& bias, const Optional& seed, double eps,
                                 double dropout_p, at::ScalarType /*input_dtype*/) {
    const auto results = run({.kind = kLayerNorm,
                              .input = input,
                              .residual = residual,
                              .normalized_shape = normalized_shape,
                              .weight = weight,
                              .bias = bias,
                              .seed = seed,
                              .eps = eps,
                              .dropout_p = dropout_p});
    return {results.output, results.summed, results.mean, results.rstd};
  }

  static Tensors4 add_layer_norm_backward(const Optional& grad_normed, const Optional& grad_summed,
                                          const Tensor& summed, const Optional& weight,
                                          const Tensor& mean, const Tensor& rstd,
                                          const Optional& seed, Shape normalized_shape,
                                          double /*eps*/, double dropout_p,
                                          at::ScalarType input_dtype, Mask mask) {
    const auto grads = run_backward({.kind = kLayerNorm,
                                     .grad_output = grad_normed,
                                     .grad_summed = grad_summed,
                                     .normalized = summed,
                                     .weight = weight,
                                     .mean = mean,
                                     .rstd = rstd,
                                     .seed = seed,
                                     .normalized_shape = normalized_shape,
                                     .dropout_p = dropout_p,
                                     .input_dtype = input_dtype,
                                     .wanted = {mask[0], mask[1], mask[2], mask[3]}});
    return {grads.input, grads.residual, grads.weight, grads.bias};
  }

  static Tensors3 add_rms_norm(const Tensor& input, const Tensor& residual, Shape normalized_shape,
                               const Optional& weight, const Optional& seed, double eps,
                               double weight_offset, std::string_view rounding, double dropout_p,
                               at::ScalarType /*input_dtype*/) {
    const auto results = run({.kind = rms_norm_kind(weight_offset, rounding),
                              .input = input,
                              .residual = residual,
                              .normalized_shape = normalized_shape,
                              .weight = weight,
                              .seed = seed,
                              .eps = eps,
                              .dropout_p = dropout_p});
    return {results.output, results.summed, results.rstd};
  }

  static Tensors3 add_rms_norm_backward(const Optional& grad_normed, const Optional& grad_summed,
                                        const Tensor& summed, const Optional& weight,
                                        const Tensor& rstd, const Optional& seed,
                                        Shape normalized_shape, double /*eps*/,
                                        double weight_offset, std::string_view rounding,
                                        double dropout_p, at::ScalarType input_dtype, Mask mask) {
    const auto grads = run_backward({.kind = rms_norm_kind(weight_offset, rounding),
                                     .grad_output = grad_normed,
                                     .grad_summed = grad_summed,
                                     .normalized = summed,
                                     .weight = weight,
                                     .rstd = rstd,
                                     .seed = seed,
                                     .normalized_shape = normalized_shape,
                                     .dropout_p = dropout_p,
                                     .input_dtype = input_dtype,
                                     .wanted = {mask[0], mask[1], mask[2], false}});
    return {grads.input, grads.residual, grads.weight};
  }

  static void implement(torch::Library& m) {
    m.impl("layer_norm", layer_norm);
    m.impl("layer_norm_backward", layer_norm_backward);
    m.impl("rms_norm", rms_norm);
    m.impl("rms_norm_backward", rms_norm_backward);
    m.impl("add_layer_norm", add_layer_norm);
    m.impl("add_layer_norm_backward", add_layer_norm_backward);
    m.impl("add_rms_norm", add_rms_norm);
    m.impl("add_rms_norm_backward", add_rms_norm_backward);
  }
};

}  // namespace fusedops
