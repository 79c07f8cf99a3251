// The kernels of adamw.h for callers outside of the library: the step queue (../host), which has
// threads of its own. They run on the calling thread, by the best instruction set of this machine.
#pragma once

#include "adamw.h"

namespace fusedops {

__attribute__((visibility("default"))) void step_chunks(const AdamWCall& call, int64_t first,
                                                        int64_t last);
__attribute__((visibility("default"))) void sum_squares(const SquareSumsCall& call, int64_t first,
                                                        int64_t last);

}  // namespace fusedops
