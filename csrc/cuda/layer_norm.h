// Interface between the binding of layer_norm and its kernels. Pointers are device memory; a call
// enqueues on `stream` and returns the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "types.h"

namespace fusedops::cuda {

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
  Type dtype;
  Type parameter_dtype;
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
  void* partials;           // [2, partial_rows(...), columns], accumulation dtype
  int64_t rows;
  int64_t columns;
  Type dtype;
  Type parameter_dtype;
};

cudaError_t layer_norm_forward(const LayerNormForward& arguments, cudaStream_t stream);
cudaError_t layer_norm_backward(const LayerNormBackward& arguments, cudaStream_t stream);

// How many partial rows the sums over rows are cut into; depends on the sizes and on the GPU alone.
int64_t partial_rows(int64_t rows, int64_t columns, Type dtype);

}  // namespace fusedops::cuda
