// Interface between the bindings of gelu and bias_gelu and the kernels of gelu, and the variants.
#pragma once

#include <cstdint>
#include <string_view>

#include "../common/activation.h"
#include "../common/dtype.h"
#include "../common/isa.h"

namespace fusedops {

struct GeluForward {
  const void* input;  // [count]
  void* output;       // [count]
  int64_t count;
  Activation activation;
  DType dtype;
};

struct GeluBackward {
  const void* grad_output;  // [count]
  const void* input;        // [count]
  void* grad_input;         // [count]
  int64_t count;
  Activation activation;
  DType dtype;
};

// torch's `approximate`, extended by "fast"; fusedops/ops/gelu.py has checked the name.
inline Activation gelu_variant(std::string_view approximate) {
  if (approximate == "tanh") return Activation::gelu_tanh;
  return approximate == "fast" ? Activation::fast_gelu : Activation::gelu;
}

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(gelu_forward, const GeluForward&)
FUSEDOPS_DECLARE_ISA(gelu_backward, const GeluBackward&)
