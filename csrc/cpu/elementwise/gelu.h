// Interface between the binding of gelu and its kernels.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct GeluForward {
  const void* input;  // [count]
  void* output;       // [count]
  int64_t count;
  Activation activation;
  DType dtype;
};

struct GeluBackward {
  const void* grad_output;  // [count]
  const void* input;        // [count]
  void* grad_input;         // [count]
  int64_t count;
  Activation activation;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(gelu_forward, const GeluForward&)
FUSEDOPS_DECLARE_ISA(gelu_backward, const GeluBackward&)
