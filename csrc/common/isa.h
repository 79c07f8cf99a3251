// The table of instruction sets. A kernel in X.isa.cpp is compiled once per instruction set into
// namespace fusedops::DEFAULT, ::AVX2 and ::AVX512; a binding calls FUSEDOPS_CALL_ISA(name, ...),
// which runs the best one that the machine has (as torch judges it: ATEN_CPU_CAPABILITY applies).
#pragma once

#include <string>

#include <ATen/Version.h>

namespace fusedops {

enum class Isa { DEFAULT, AVX2, AVX512 };

inline Isa current_isa() {
  static const Isa isa = [] {
    const std::string name = at::get_cpu_capability();
    return name == "AVX512" ? Isa::AVX512 : name == "AVX2" ? Isa::AVX2 : Isa::DEFAULT;
  }();
  return isa;
}

// Whether the AVX512 kernels may use vcvtneps2bf16, one instruction instead of eight
// (csrc/isa.cpp).
extern const bool kHasAvx512Bf16;

}  // namespace fusedops

#if defined(__x86_64__)
#define FUSEDOPS_DECLARE_ISA(name, ...) \
  namespace fusedops {                  \
  namespace DEFAULT {                   \
  void name(__VA_ARGS__);               \
  }                                     \
  namespace AVX2 {                      \
  void name(__VA_ARGS__);               \
  }                                     \
  namespace AVX512 {                    \
  void name(__VA_ARGS__);               \
  }                                     \
  }
#define FUSEDOPS_CALL_ISA(name, ...)                                                            \
  (::fusedops::current_isa() == ::fusedops::Isa::AVX512 ? ::fusedops::AVX512::name(__VA_ARGS__) \
   : ::fusedops::current_isa() == ::fusedops::Isa::AVX2 ? ::fusedops::AVX2::name(__VA_ARGS__)   \
                                                        : ::fusedops::DEFAULT::name(__VA_ARGS__))
#else
#define FUSEDOPS_DECLARE_ISA(name, ...) \
  namespace fusedops::DEFAULT {         \
  void name(__VA_ARGS__);               \
  }
#define FUSEDOPS_CALL_ISA(name, ...) ::fusedops::DEFAULT::name(__VA_ARGS__)
#endif
