// Interface between the bindings of the norms (layer_norm, rms_norm, add_layer_norm, add_rms_norm)
// and the kernels that serve all four. Pointers are device memory; a call enqueues on `stream` and
// returns the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dropout.h"
#include "types.h"

namespace fusedops::cuda {

struct NormForward {
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
  DropoutArguments dropout;  // of input
  Type input_dtype;          // dtype, or a half-precision one with f32
  Type dtype;                // of residual and summed
  Type parameter_dtype;      // dtype, or f32
  Type output_dtype;         // dtype, or f32
};

struct NormBackward {
  const void* grad_output;  // [rows, columns], or null: only grad_summed passes
  const void* grad_summed;  // [rows, columns] or null
  const void* input;        // [rows, columns], what was normalised
  const void* weight;       // [columns] or null
  const void* mean;         // [rows]; null: rows were not centred
  const void* rstd;         // [rows]
  void* grad_input;         // [rows, columns], input_dtype, or null
  void* grad_residual;      // [rows, columns] or null
  void* grad_weight;        // [columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // [2, partial_rows(...), columns], accumulation dtype
  int64_t rows;
  int64_t columns;
  double weight_offset;
  DropoutArguments dropout;
  Type input_dtype;
  Type dtype;
  Type parameter_dtype;
};

// Without residual; with one.
cudaError_t norm_forward(const NormForward& arguments, cudaStream_t stream);
cudaError_t add_norm_forward(const NormForward& arguments, cudaStream_t stream);

// Without grad_summed and grad_residual; with them.
cudaError_t norm_backward(const NormBackward& arguments, cudaStream_t stream);
cudaError_t add_norm_backward(const NormBackward& arguments, cudaStream_t stream);

// How many partial rows the sums over rows are cut into; depends on the sizes and on the GPU alone.
int64_t partial_rows(int64_t rows, int64_t columns, Type dtype);

}  // namespace fusedops::cuda
