// Interface between the binding of bias_dropout_add and its kernels.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"
#include "../../common/philox.h"

namespace fusedops {

struct BiasDropoutAddForward {
  const void* input;     // [rows, columns]
  const void* bias;      // [columns] or null
  const void* residual;  // [rows, columns]
  void* output;          // [rows, columns]
  int64_t rows;
  int64_t columns;
  Dropout dropout;
  DType input_dtype;
  DType bias_dtype;
  DType dtype;  // of residual and output
};

struct BiasDropoutAddBackward {
  const void* grad_output;  // [rows, columns]
  void* grad_input;         // [rows, columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // [chunks, columns], accumulation dtype, null without grad_bias
  int64_t rows;
  int64_t columns;
  Dropout dropout;
  DType input_dtype;
  DType bias_dtype;
  DType dtype;  // of grad_output
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(bias_dropout_add_forward, const BiasDropoutAddForward&)
FUSEDOPS_DECLARE_ISA(bias_dropout_add_backward, const BiasDropoutAddBackward&)
