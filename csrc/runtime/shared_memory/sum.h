// Interface between the shared-memory channel and its kernel: the sum of as many arrays as there
// are ranks.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// Neighbours are added first, then pairs of them, and so on, in the accumulation dtype; the result
// is rounded once: `ordered_sum` of fusedops/parallel/comm/collectives.py, to the bit.
struct SharedSum {
  const void* const* parts;  // [ranks]
  int64_t ranks;             // at most kMaxSharedRanks
  void* out;                 // may be one of the parts
  int64_t numel;
  DType dtype;
};

inline constexpr int64_t kMaxSharedRanks = 64;

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(shared_sum, const fusedops::SharedSum&)
