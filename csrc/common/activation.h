// The activations by name: the enum that kernels are templated on and the parser of the schema's
// `str activation`. The formulae are in fusedops/_core/activation.py and
// csrc/cpu/elementwise/activation.h.
#pragma once

#include <string_view>

namespace fusedops {

enum class Activation { identity = 0, relu, relu2, silu, gelu, gelu_tanh, fast_gelu };

inline constexpr std::string_view kActivationNames[] = {"identity", "relu",      "relu2",    "silu",
                                                        "gelu",     "gelu_tanh", "fast_gelu"};

// Index of `name` in kActivationNames, or -1.
constexpr int find_activation(std::string_view name) {
  int index = 0;
  for (const std::string_view known : kActivationNames) {
    if (known == name) return index;
    ++index;
  }
  return -1;
}

// torch's `approximate`, extended by "fast"; fusedops/ops/gelu.py has checked the name.
inline Activation gelu_variant(std::string_view approximate) {
  if (approximate == "tanh") return Activation::gelu_tanh;
  return approximate == "fast" ? Activation::fast_gelu : Activation::gelu;
}

}  // namespace fusedops
