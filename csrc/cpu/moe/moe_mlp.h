// Kernels of moe_mlp: the epilogues of the experts' products, and small passes over rows.
//
// A row is a token at one of its experts. z = x * w1 + b1 is `width` wide, what is made of it
// `columns`: the same, or, where z holds a gate and a factor, half.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../gemm/gemm.h"

namespace fusedops {

// Where gate and up of a column stand in z: nowhere (h = act(z)), in its two halves, or side by
// side.
enum class GateLayout { none, halves, pairs };

// h = act(z), act(gate) * up, or, clamped, GPT-OSS's (min(max(up, -7), 7) + 1) * act(min(gate, 7)).
struct Gate {
  Activation activation;
  GateLayout layout;
  bool clamped;
};

// Epilogue of the first product of one expert: hidden = scale * h(z).
struct ExpertForward {
  GemmCall product;     // m rows, n = width (n = columns for `halves`, with `up` as second_b)
  Matrix up;            // B of the second half; for `halves` only
  const void* bias;     // [width] or null
  const void* scale;    // [m] of the accumulation dtype
  void* preactivation;  // [m, width] or null
  void* hidden;         // [m, columns]
  int64_t columns;
  Gate gate;
};

// Epilogue of the product that gives the gradient d of `hidden` of one expert: the sums never reach
// memory.
struct ExpertBackward {
  GemmCall product;           // m rows, n = columns
  const void* preactivation;  // [m, width]
  const void* scale;          // [m] of the accumulation dtype
  void* grad_preactivation;   // [m, width]: scale * d * h'(z), or null
  void* hidden;               // [m, columns]: scale * h(z), or null
  void* dots;                 // [m, dots_stride], accumulation dtype: parts of <d, h(z)>, or null
  int64_t dots_stride;
  Gate gate;
};

// The least columns of a tile: what bounds the number of parts of a dot product.
inline constexpr int64_t kLeastTileColumns = 4;

// What each slot of the plan gets: grad[permutation[r]] = sum of dots[r] + <rows[tokens[r]], bias
// of the row's group>, in this order; zeros for the rows of no group.
struct SlotGradients {
  const int32_t* permutation;  // [rows]
  const int32_t* tokens;       // [rows]
  const int64_t* ends;         // [groups]
  const void* dots;            // [rows of groups, dots_stride]
  int64_t dots_stride;
  int64_t product_columns;  // of the product that made `dots`
  const void* grad_output;  // rows of [size], dense; read with `bias` only
  const void* bias;         // [groups, size], or null
  int64_t size;
  int64_t groups;
  int64_t rows;
  void* grad;  // [rows]
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(expert_forward, const ExpertForward* experts, int64_t count)
FUSEDOPS_DECLARE_ISA(expert_backward, const ExpertBackward* experts, int64_t count)
FUSEDOPS_DECLARE_ISA(slot_gradients, const SlotGradients&)
