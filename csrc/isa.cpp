// What the processor has, found out once: the best instruction set of common/isa.h that is built
// and runs here, and what it has beyond.
#include "common/isa.h"

#include <string>

#include <ATen/Version.h>

namespace fusedops {

Isa current_isa() {
  static const Isa isa = [] {
    [[maybe_unused]] const std::string has = at::get_cpu_capability();
#if defined(FUSEDOPS_HAS_AVX512)
    if (has == "AVX512") return Isa::AVX512;
#endif
#if defined(FUSEDOPS_HAS_AVX2)
    if (has == "AVX512" || has == "AVX2") return Isa::AVX2;
#endif
    return Isa::DEFAULT;
  }();
  return isa;
}

#if defined(__x86_64__)
const bool kHasAvx512Bf16 = __builtin_cpu_supports("avx512bf16") != 0;
#else
const bool kHasAvx512Bf16 = false;
#endif

}  // namespace fusedops
