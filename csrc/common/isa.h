// The table of instruction sets. A kernel in X.isa.cpp is compiled once per instruction set into
// namespace fusedops::DEFAULT, ::AVX2 and ::AVX512; a binding calls FUSEDOPS_CALL_ISA(name, ...),
// which runs the best one that the machine has (as torch judges it: ATEN_CPU_CAPABILITY applies)
// and FUSEDOPS_MAX_ISA allows.
//
// A build may hold some of them only (tools/native.py defines FUSEDOPS_HAS_X for each). One that
// holds none which runs here is refused by fusedops/_core/extension.py.
#pragma once

namespace fusedops {

enum class Isa { DEFAULT, AVX2, AVX512 };

// Which of the instruction sets that were built runs here (csrc/isa.cpp).
Isa current_isa();

// Whether the AVX512 kernels may use vcvtneps2bf16, one instruction instead of eight, and
// vdpbf16ps (csrc/isa.cpp).
extern const bool kHasAvx512Bf16;

// Whether the AVX512 kernels multiply bfloat16 by AMX (cpu/gemm/tile_registers.h). The first call
// asks the system for the registers. From then on the system refuses alternate signal stacks that
// are too small for them, those of other libraries too: only what is about to multiply bfloat16
// calls this.
bool has_tiles();

// Whether products of one row read long rows of the other operand (cpu/gemm/gemm_unpacked.h): on
// processors by Intel, and where their tiles are trapped, so that every machine can test it.
extern const bool kReadsLongRows;

}  // namespace fusedops

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

#if defined(FUSEDOPS_HAS_AVX512)
#define FUSEDOPS_CASE_AVX512(name, ...) \
  case ::fusedops::Isa::AVX512:         \
    return ::fusedops::AVX512::name(__VA_ARGS__);
#else
#define FUSEDOPS_CASE_AVX512(name, ...)
#endif
#if defined(FUSEDOPS_HAS_AVX2)
#define FUSEDOPS_CASE_AVX2(name, ...) \
  case ::fusedops::Isa::AVX2:         \
    return ::fusedops::AVX2::name(__VA_ARGS__);
#else
#define FUSEDOPS_CASE_AVX2(name, ...)
#endif
#if defined(FUSEDOPS_HAS_DEFAULT)
#define FUSEDOPS_CASE_DEFAULT(name, ...) \
  case ::fusedops::Isa::DEFAULT:         \
    return ::fusedops::DEFAULT::name(__VA_ARGS__);
#else
#define FUSEDOPS_CASE_DEFAULT(name, ...)
#endif
#define FUSEDOPS_CALL_ISA(name, ...)           \
  [&] {                                        \
    switch (::fusedops::current_isa()) {       \
      FUSEDOPS_CASE_AVX512(name, __VA_ARGS__)  \
      FUSEDOPS_CASE_AVX2(name, __VA_ARGS__)    \
      FUSEDOPS_CASE_DEFAULT(name, __VA_ARGS__) \
      default:                                 \
        __builtin_unreachable();               \
    }                                          \
  }()
