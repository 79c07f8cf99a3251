// Interface between the bindings of moe_permute, moe_unpermute and moe_relayout and their kernels:
// rows that move between tokens, experts and layouts.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// Rows of `size` elements that lie next to each other; `stride` elements from row to row.
struct MoeRows {
  const void* data;
  int64_t stride;
};

// Where the rows of each token stand. Slots with a row at or past `real` are dropped.
struct MoeSlots {
  const int32_t* positions;  // [tokens, top_k], each in [0, tokens * top_k)
  int64_t tokens;
  int64_t top_k;
  int64_t real;
};

// output[positions[t, j]] = input[t], or zeros where dropped. Copies bytes: sizes are in bytes.
struct MoeScatter {
  MoeSlots slots;
  const void* input;  // [tokens] rows
  int64_t input_stride;
  void* output;  // [tokens * top_k, row_bytes] dense
  int64_t row_bytes;
};

// output[t] = sum_j probs[t, j] * input[positions[t, j]] over kept slots, in the order of j.
struct MoeCombine {
  MoeSlots slots;
  MoeRows input;      // [tokens * top_k, size]
  const void* probs;  // [tokens, top_k] float32 (float64 for float64), or null: all 1
  void* output;       // [tokens, size] dense
  int64_t size;
  DType dtype;
};

// grad_input[positions[t, j]] = probs[t, j] * grad_output[t], or zeros where dropped;
// grad_probs[t, j] = <input[positions[t, j]], grad_output[t]>, or zero.
struct MoeCombineBackward {
  MoeSlots slots;
  MoeRows grad_output;  // [tokens, size]
  MoeRows input;        // [tokens * top_k, size], read for grad_probs only
  const void* probs;    // [tokens, top_k], or null: all 1
  void* grad_input;     // [tokens * top_k, size] dense, or null
  void* grad_probs;     // [tokens, top_k], or null
  int64_t size;
  DType dtype;
};

// output[m] = input[index[m]], or zeros where index[m] is negative. Sizes are in bytes.
struct MoeGather {
  const int32_t* index;  // [rows]
  int64_t rows;
  const void* input;
  int64_t input_stride;
  void* output;  // [rows, row_bytes] dense
  int64_t row_bytes;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(moe_scatter, const MoeScatter&)
FUSEDOPS_DECLARE_ISA(moe_combine, const MoeCombine&)
FUSEDOPS_DECLARE_ISA(moe_combine_backward, const MoeCombineBackward&)
FUSEDOPS_DECLARE_ISA(moe_gather, const MoeGather&)
