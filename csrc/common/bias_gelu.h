// What the bindings of bias_gelu tell its kernels, on the CPU and on CUDA. No torch header: nvcc
// reads this too.
#pragma once

#include <cstdint>

#include "activation.h"
#include "types.h"

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
  void* partials;           // [chunks of rows, columns], accumulation dtype; null without grad_bias
  int64_t rows;
  int64_t columns;
  Activation activation;
  DType dtype;
  DType bias_dtype;
};

}  // namespace fusedops
