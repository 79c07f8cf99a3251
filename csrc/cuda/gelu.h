// Interface between the bindings of gelu and bias_gelu and their kernels. Pointers are device
// memory; a call enqueues on `stream` and returns the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/activation.h"
#include "types.h"

namespace fusedops::cuda {

struct Gelu {
  const void* grad_output;  // [count], or null: the forward
  const void* input;        // [count]
  void* output;             // [count]: the result, or the gradient of the input
  int64_t count;
  Activation activation;
  Type dtype;
};

struct BiasGeluForward {
  const void* input;  // [rows, columns]
  const void* bias;   // [columns]
  void* output;       // [rows, columns]
  int64_t rows;
  int64_t columns;
  Activation activation;
  Type dtype;
  Type bias_dtype;
};

struct BiasGeluBackward {
  const void* grad_output;  // [rows, columns]
  const void* input;        // [rows, columns]
  const void* bias;         // [columns]
  void* grad_input;         // [rows, columns] or null
  void* grad_bias;          // [columns] or null
  void* partials;           // [bias_gelu_partials(...), columns], accumulation dtype
  int64_t rows;
  int64_t columns;
  Activation activation;
  Type dtype;
  Type bias_dtype;
};

cudaError_t gelu(const Gelu& arguments, cudaStream_t stream);
cudaError_t bias_gelu_forward(const BiasGeluForward& arguments, cudaStream_t stream);
cudaError_t bias_gelu_backward(const BiasGeluBackward& arguments, cudaStream_t stream);

// How many partial rows the bias gradient is cut into; depends on the sizes and on the GPU alone.
int64_t bias_gelu_partials(int64_t rows, int64_t columns, Type dtype);

}  // namespace fusedops::cuda
