// What the processor has and FUSEDOPS_MAX_ISA allows, found out once: the best instruction set of
// common/isa.h that is built and runs here, and what it has beyond.
#include "common/isa.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include <ATen/Version.h>
#include <torch/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace fusedops {
namespace {

// The values of FUSEDOPS_MAX_ISA (fusedops/_core/env.py has the same list).
enum class Limit { base, avx2, avx512, avx512_bf16, amx, amx_emulated };

Limit limit() {
  static const Limit asked = [] {
    constexpr std::string_view kNames[] = {"default",     "avx2", "avx512",
                                           "avx512_bf16", "amx",  "amx_emulated"};
    const char* name = std::getenv("FUSEDOPS_MAX_ISA");
    const auto* found = std::find(std::begin(kNames), std::end(kNames), name ? name : "amx");
    return found == std::end(kNames) ? Limit::amx : static_cast<Limit>(found - kNames);
  }();
  return asked;
}

bool has_avx512_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

// Whether the processor has tiles of bfloat16, and the system gives them to this process. Once
// granted they are for all of its threads, and for its children.
bool get_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTiles = 1U << 24, kOfBFloat16 = 1U << 22;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kTiles) == 0 || (d & kOfBFloat16) == 0) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

TileForm tile_form() {
  if (current_isa() != Isa::AVX512 || !has_avx512_bf16()) return TileForm::none;
  if (limit() == Limit::amx_emulated) return TileForm::emulated;
  return limit() == Limit::amx && get_tiles() ? TileForm::hardware : TileForm::none;
}

}  // namespace

Isa current_isa() {
  static const Isa isa = [] {
    [[maybe_unused]] const std::string has = at::get_cpu_capability();
#if defined(FUSEDOPS_HAS_AVX512)
    if (has == "AVX512" && limit() >= Limit::avx512) return Isa::AVX512;
#endif
#if defined(FUSEDOPS_HAS_AVX2)
    if ((has == "AVX512" || has == "AVX2") && limit() >= Limit::avx2) return Isa::AVX2;
#endif
    return Isa::DEFAULT;
  }();
  return isa;
}

const bool kHasAvx512Bf16 = limit() >= Limit::avx512_bf16 && has_avx512_bf16();
const TileForm kTileForm = tile_form();

namespace {

// What the kernels run on, for `fusedops doctor`.
std::string isa_in_use() {
  switch (current_isa()) {
    case Isa::AVX512:
      return kTileForm == TileForm::hardware   ? "amx"
             : kTileForm == TileForm::emulated ? "amx_emulated"
             : kHasAvx512Bf16                  ? "avx512_bf16"
                                               : "avx512";
    case Isa::AVX2:
      return "avx2";
    default:
      return "default";
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.def("isa_in_use() -> str", &isa_in_use);
}

}  // namespace fusedops
