// What the processor has beyond the three instruction sets of common/isa.h, found out once.
#include "common/isa.h"

namespace fusedops {

#if defined(__x86_64__)
const bool kHasAvx512Bf16 = __builtin_cpu_supports("avx512bf16") != 0;
#else
const bool kHasAvx512Bf16 = false;
#endif

}  // namespace fusedops
