// What the processor has and FUSEDOPS_MAX_ISA allows, found out once: the best instruction set of
// common/isa.h that is built and runs here, and what it has beyond.
#include "common/isa.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
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

// Defined where tests/tile_trap.cpp is loaded before this library: takes the place of the system's
// permission, and returns an error number or zero.
extern "C" __attribute__((weak, visibility("default"))) int fusedops_trap_tiles();

namespace fusedops {
namespace {

// The values of FUSEDOPS_MAX_ISA (fusedops/_core/env.py has the same list).
enum class Limit { base, avx2, avx512, avx512_bf16, amx, amx_trapped };

Limit limit() {
  static const Limit asked = [] {
    constexpr std::string_view kNames[] = {"default",     "avx2", "avx512",
                                           "avx512_bf16", "amx",  "amx_trapped"};
    const char* name = std::getenv("FUSEDOPS_MAX_ISA");
    const auto* found = std::find(std::begin(kNames), std::end(kNames), name ? name : "amx");
    return found == std::end(kNames) ? Limit::amx : static_cast<Limit>(found - kNames);
  }();
  return asked;
}

#if defined(__x86_64__)
const bool kProcessorHasBf16 = __builtin_cpu_supports("avx512bf16") != 0;
const bool kIsIntel = __builtin_cpu_is("intel") != 0;
#else
const bool kProcessorHasBf16 = false, kIsIntel = false;
#endif

// What it means that the system refuses the tile registers with an error number.
std::string explain(int error) {
  const std::string number =
      "the system refuses the tile registers (" + std::string(std::strerror(error)) + "): ";
  switch (error) {
    case ENOSPC:
      return number +
             "a thread of this process has an alternate signal stack that is too small "
             "for them";
    case EINVAL:
      return number + "this kernel does not know them, Linux 5.16 and newer do";
    case EOPNOTSUPP:
      return number + "this kernel or its hypervisor does not save them";
    default:
      return number + "a filter of system calls may forbid arch_prctl";
  }
}

// Asks for the tile registers. Once granted they are for all threads of this process, and for its
// children. Returns why there are none.
std::string request_tiles() {
#if defined(FUSEDOPS_WITHOUT_TILES)
  return "this library was built by an assembler that does not know AMX; binutils 2.36 and newer "
         "do";
#elif defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTiles = 1U << 24, kOfBFloat16 = 1U << 22;
  const bool is_known = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0;
  const bool executes = is_known && (d & kTiles) != 0 && (d & kOfBFloat16) != 0;
  if (limit() == Limit::amx_trapped) {
    if (executes) return "FUSEDOPS_MAX_ISA=amx_trapped is for processors without AMX";
    if (fusedops_trap_tiles == nullptr) {
      return "FUSEDOPS_MAX_ISA=amx_trapped needs tests/trapped_tiles.py, which traps the "
             "instructions";
    }
    const int error = fusedops_trap_tiles();
    return error == 0 ? "" : explain(error);
  }
  if (!executes) return "the processor has no AMX for bfloat16, or a hypervisor hides it";
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0 ? "" : explain(errno);
#else
  return "AMX needs Linux on x86-64";
#endif
}

// Why there are no tiles; empty where there are.
const std::string& why_no_tiles() {
  static const std::string reason = []() -> std::string {
    if (limit() < Limit::amx) return "FUSEDOPS_MAX_ISA allows less";
    if (current_isa() != Isa::AVX512 || !kProcessorHasBf16) {
      return "the kernels for AVX-512 with bfloat16 do not run here";
    }
    return request_tiles();
  }();
  return reason;
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

const bool kHasAvx512Bf16 = limit() >= Limit::avx512_bf16 && kProcessorHasBf16;
const bool kReadsLongRows = kIsIntel || limit() == Limit::amx_trapped;

bool has_tiles() {
  return why_no_tiles().empty();
}

namespace {

// What the kernels run on, for `fusedops doctor`. Asks the system for the tile registers.
std::string isa_in_use() {
  switch (current_isa()) {
    case Isa::AVX512:
      if (has_tiles()) return limit() == Limit::amx_trapped ? "amx_trapped" : "amx";
      return kHasAvx512Bf16 ? "avx512_bf16" : "avx512";
    case Isa::AVX2:
      return "avx2";
    default:
      return "default";
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.def("isa_in_use() -> str", &isa_in_use);
  m.def("why_no_tiles() -> str", [] { return why_no_tiles(); });
}

}  // namespace fusedops
