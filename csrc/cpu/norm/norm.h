// Interface between the bindings of the norms and their kernels.
#pragma once

#include "../../common/isa.h"
#include "../../common/norm.h"
#include "../../common/philox.h"

namespace fusedops {

using NormForward = NormForwardOf<Dropout>;
using NormBackward = NormBackwardOf<Dropout>;  // partials: [chunks, 2, columns]

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(norm_forward, const NormForward&)
FUSEDOPS_DECLARE_ISA(norm_backward, const NormBackward&)
