// What the bindings of the norms share: tensors in, NormForward and NormBackward, tensors out.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace fusedops {

// How a norm differs from its neighbours.
struct NormKind {
  bool centred;                      // layer norm; else RMS norm
  double weight_offset = 0.0;        // added to the weight
  bool round_before_weight = false;  // and multiply in the weight's dtype
};

// An RMS norm; throws when no `rounding` is called so.
NormKind rms_kind(double weight_offset, std::string_view rounding);

struct NormResults {
  at::Tensor output;
  at::Tensor summed;  // undefined without residual
  at::Tensor mean;    // undefined for an RMS norm
  at::Tensor rstd;
};

NormResults run_norm(const NormKind& kind, const at::Tensor& input,
                     const std::optional<at::Tensor>& residual, at::IntArrayRef normalized_shape,
                     const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                     const std::optional<at::Tensor>& seed, double eps, double dropout_p);

struct NormGradients {
  at::Tensor input;
  at::Tensor residual;
  at::Tensor weight;
  at::Tensor bias;
};

// `normalized` is what was normalised. Wanted are the gradients of input, residual, weight and
// bias; that of input is left out where it is that of residual (see Gradient.same).
NormGradients run_norm_backward(const NormKind& kind, const std::optional<at::Tensor>& grad_output,
                                const std::optional<at::Tensor>& grad_summed,
                                const at::Tensor& normalized,
                                const std::optional<at::Tensor>& weight,
                                const std::optional<at::Tensor>& mean, const at::Tensor& rstd,
                                const std::optional<at::Tensor>& seed,
                                at::IntArrayRef normalized_shape, double dropout_p,
                                at::ScalarType input_dtype, std::array<bool, 4> wanted);

}  // namespace fusedops
