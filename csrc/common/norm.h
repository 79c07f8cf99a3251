// What the bindings of the norms (layer_norm, rms_norm, add_layer_norm, add_rms_norm) tell the
// kernels that serve all four, on the CPU and on CUDA. No torch header: nvcc reads this too.
#pragma once

#include <cstdint>

#include "types.h"

namespace fusedops {

template <typename Dropout>
struct NormForwardOf {
  const void* input;     // [rows, columns], input_dtype
  const void* residual;  // [rows, columns], or null: the rows of input are normalised
  const void* weight;    // [columns] or null
  const void* bias;      // [columns] or null
  void* output;          // [rows, columns], output_dtype
  void* summed;          // [rows, columns]; null without residual
  void* mean;            // [rows], accumulation dtype; null: rows are not centred (RMS)
  void* rstd;            // [rows], accumulation dtype
  int64_t rows;
  int64_t columns;
  double eps;
  double weight_offset;      // added to the weight
  bool round_before_weight;  // to dtype
  Dropout dropout;           // of input
  DType input_dtype;         // dtype, or a half-precision one with f32
  DType dtype;               // of residual and summed
  DType parameter_dtype;
  DType output_dtype;  // dtype, or f32 with a half-precision one
};

template <typename Dropout>
struct NormBackwardOf {
  const void* grad_output;  // [rows, columns], or null: only grad_summed passes
  const void* grad_summed;  // [rows, columns] or null
  const void* input;        // [rows, columns], what was normalised
  const void* weight;       // [columns] or null
  const void* mean;         // [rows]; null: rows were not centred
  const void* rstd;         // [rows]
  void* grad_input;         // [rows, columns], input_dtype, or null; of the input before dropout
  void* grad_residual;      // [rows, columns] or null
  void* grad_weight;        // [columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // accumulation dtype, null without parameters: as the device sums
  int64_t rows;
  int64_t columns;
  double weight_offset;
  Dropout dropout;
  DType input_dtype;
  DType dtype;
  DType parameter_dtype;
};

}  // namespace fusedops
