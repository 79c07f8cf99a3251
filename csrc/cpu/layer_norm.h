// Interface between the binding of layer_norm and its kernels.
#pragma once

#include <cstdint>

#include "../common/dtype.h"
#include "../common/isa.h"

namespace fusedops {

struct LayerNormForward {
  const void* input;   // [rows, columns]
  const void* weight;  // [columns] or null
  const void* bias;    // [columns] or null
  void* output;        // [rows, columns]
  void* mean;          // [rows], accumulation dtype
  void* rstd;          // [rows], accumulation dtype
  int64_t rows;
  int64_t columns;
  double eps;
  DType dtype;
  DType parameter_dtype;
};

struct LayerNormBackward {
  const void* grad_output;  // [rows, columns]
  const void* input;        // [rows, columns]
  const void* weight;       // [columns] or null
  const void* mean;         // [rows]
  const void* rstd;         // [rows]
  void* grad_input;         // [rows, columns] or null
  void* grad_weight;        // [columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // [chunks, 2, columns], accumulation dtype, null without parameters
  int64_t rows;
  int64_t columns;
  DType dtype;
  DType parameter_dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(layer_norm_forward, const LayerNormForward&)
FUSEDOPS_DECLARE_ISA(layer_norm_backward, const LayerNormBackward&)
