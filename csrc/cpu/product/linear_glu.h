// Kernels of linear_glu: the epilogue of its two products, and the pass over the gradient.
//
// `rows` are tokens, `columns` the features of the pre-activations gate = input * gate_weight^T and
// up = input * up_weight^T.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../gemm/gemm.h"

namespace fusedops {

// output = act(gate) * up, or act(min(gate, limit)) * min(max(up, -limit), limit). Row-major
// results.
struct LinearGluForward {
  GemmCall product;  // up_weight is second_b; store and context are filled in
  void* gate;        // [rows, columns] or null
  void* up;          // [rows, columns] or null
  void* output;      // [rows, columns] or null
  Activation activation;
  double limit = 0;  // 0: none
};

// grad_gate = grad_output * up * act'(gate), grad_up = grad_output * act(gate); dense, flat.
// With a limit they are those of the bounded values, and 0 where gate or up was bounded.
struct GluGradient {
  const void* grad_output;
  const void* gate;
  const void* up;
  void* grad_gate;  // or null
  void* grad_up;    // or null
  int64_t numel;
  Activation activation;
  DType dtype;
  double limit = 0;  // 0: none
};

// Epilogue of the product that gives the gradient of a gated layer's hidden features, which never
// reach memory: the gradients of gate and up take their places.
struct GluHiddenGradient {
  GemmCall product;  // m = rows, n = columns; store and context are filled in
  void* gate;        // [rows, columns]
  void* up;          // [rows, columns]
  void* hidden;      // [rows, columns], act(gate) * up, or null
  Activation activation;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(linear_glu_forward, const LinearGluForward&)
FUSEDOPS_DECLARE_ISA(glu_gradient, const GluGradient&)
FUSEDOPS_DECLARE_ISA(glu_hidden_gradient, const GluHiddenGradient&)
