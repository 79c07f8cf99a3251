// Interface between the binding of gelu and its kernel.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct Gelu {
  const void* grad_output;  // [count], or null: the forward
  const void* input;        // [count]
  void* output;             // [count]: the result, or the gradient of the input
  int64_t count;
  Activation activation;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(gelu, const Gelu&)
