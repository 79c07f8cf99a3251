// Kernels of linear_act and mlp: the epilogues of the matrix products, and the pass that turns the
// gradient of an activation's output into that of its input.
//
// `rows` are tokens, `columns` the features of the pre-activation z = input * weight^T + bias.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../gemm/gemm.h"

namespace fusedops {

// Epilogue of a forward product: z = sums + bias, or + bias_scale[row] * bias; output = act(z).
// Row-major results.
struct LinearForward {
  GemmCall product;     // m = rows, n = columns; store and context are filled in by the kernel
  const void* bias;     // [columns] or null
  void* preactivation;  // [rows, columns] or null
  void* output;         // [rows, columns] or null
  Activation activation;
  const void* bias_scale = nullptr;  // [rows] of the accumulation dtype, or null
};

// grad_preactivation = grad_output * act'(preactivation), and its sums over the rows.
struct ActivationGradient {
  const void* grad_output;    // [rows, columns]
  const void* preactivation;  // [rows, columns], null for identity
  void* grad_preactivation;   // [rows, columns], null for identity or where it is not wanted
  void* grad_bias;            // [columns] or null
  void* partials;  // [Chunks(rows).count, columns] of the accumulation dtype, with grad_bias
  int64_t rows;
  int64_t columns;
  Activation activation;
  DType dtype;
};

// Epilogue of the product that gives the gradient of an mlp's hidden layer: the sums never reach
// memory, what does is their product with act'(z), act(z) itself, and the sums over the rows.
struct HiddenGradient {
  GemmCall product;           // m = rows, n = columns
  const void* preactivation;  // [rows, columns]
  void* grad_preactivation;   // [rows, columns], or null
  void* hidden;               // [rows, columns], act(z), or null
  void* grad_bias;            // [columns] or null
  void* partials;             // [ceil(rows / kLeastTileRows), columns], with grad_bias
  Activation activation;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(linear_forward, const LinearForward&)
// Independent products of one dtype and activation.
FUSEDOPS_DECLARE_ISA(linear_forward_batch, const LinearForward* products, int64_t count)
FUSEDOPS_DECLARE_ISA(activation_gradient, const ActivationGradient&)
FUSEDOPS_DECLARE_ISA(hidden_gradient, const HiddenGradient&)
