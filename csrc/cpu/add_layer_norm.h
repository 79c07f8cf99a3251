// Interface between the binding of add_layer_norm and its kernels.
#pragma once

#include <cstdint>

#include "../common/dtype.h"
#include "../common/isa.h"
#include "../common/philox.h"
#include "layer_norm.h"

namespace fusedops {

struct AddLayerNormForward {
  const void* input;     // [rows, columns]
  const void* residual;  // [rows, columns]
  const void* weight;    // [columns] or null
  const void* bias;      // [columns] or null
  void* normed;          // [rows, columns]
  void* summed;          // [rows, columns]
  void* mean;            // [rows], accumulation dtype
  void* rstd;            // [rows], accumulation dtype
  int64_t rows;
  int64_t columns;
  double eps;
  Dropout dropout;
  DType input_dtype;
  DType dtype;  // of residual, normed and summed
  DType parameter_dtype;
};

struct AddLayerNormBackward {
  LayerNormBackward norm;   // of normed by summed: `input` is summed, `grad_input` is not used;
                            // `grad_output` is null when normed has no gradient
  const void* grad_summed;  // [rows, columns] or null
  void* grad_input;         // [rows, columns] or null
  void* grad_residual;      // [rows, columns] or null
  Dropout dropout;
  DType input_dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(add_layer_norm_forward, const AddLayerNormForward&)
FUSEDOPS_DECLARE_ISA(add_layer_norm_backward, const AddLayerNormBackward&)
