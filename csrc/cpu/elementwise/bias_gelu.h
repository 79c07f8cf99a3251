// Interface between the binding of bias_gelu and its kernels.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct BiasGeluForward {
  const void* input;  // [rows, columns]
  const void* bias;   // [columns]
  void* output;       // [rows, columns]
  int64_t rows;
  int64_t columns;
  Activation activation;
  DType dtype;
  DType bias_dtype;
};

struct BiasGeluBackward {
  const void* grad_output;  // [rows, columns]
  const void* input;        // [rows, columns]
  const void* bias;         // [columns]
  void* grad_input;         // [rows, columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // [chunks, columns], accumulation dtype, null without grad_bias
  int64_t rows;
  int64_t columns;
  Activation activation;
  DType dtype;
  DType bias_dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(bias_gelu_forward, const BiasGeluForward&)
FUSEDOPS_DECLARE_ISA(bias_gelu_backward, const BiasGeluBackward&)
