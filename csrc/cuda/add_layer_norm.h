// Interface between the binding of add_layer_norm and its kernels. Pointers are device memory; a
// call enqueues on `stream` and returns the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "types.h"

namespace fusedops::cuda {

// Elements whose random word is below `threshold` (0: none, 2^32: all) are dropped.
struct DropoutArguments {
  const int64_t* seed;  // [2], or null when the threshold is 0 or 2^32
  uint64_t threshold;
  double scale;
};

struct AddLayerNormForward {
  const void* input;     // [rows, columns], input_dtype
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
  DropoutArguments dropout;
  Type dtype;
  Type parameter_dtype;
  Type input_dtype;  // dtype, or a half-precision one beside f32
};

struct AddLayerNormBackward {
  const void* grad_normed;  // [rows, columns] or null
  const void* grad_summed;  // [rows, columns] or null
  const void* summed;       // [rows, columns]
  const void* weight;       // [columns] or null
  const void* mean;         // [rows]
  const void* rstd;         // [rows]
  void* grad_input;         // [rows, columns], input_dtype, or null
  void* grad_residual;      // [rows, columns] or null
  void* grad_weight;        // [columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // [2, partial_rows(...), columns], accumulation dtype
  int64_t rows;
  int64_t columns;
  DropoutArguments dropout;
  Type dtype;
  Type parameter_dtype;
  Type input_dtype;
};

cudaError_t add_layer_norm_forward(const AddLayerNormForward& arguments, cudaStream_t stream);
cudaError_t add_layer_norm_backward(const AddLayerNormBackward& arguments, cudaStream_t stream);

}  // namespace fusedops::cuda
