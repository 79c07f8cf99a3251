// Kernels of bias_gelu for each instruction set.
#pragma once

#include "../../common/bias_gelu.h"
#include "../../common/isa.h"

FUSEDOPS_DECLARE_ISA(bias_gelu_forward, const BiasGeluForward&)
FUSEDOPS_DECLARE_ISA(bias_gelu_backward, const BiasGeluBackward&)
