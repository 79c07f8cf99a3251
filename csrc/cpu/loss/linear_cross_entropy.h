// Kernels of linear_cross_entropy and linear_token_logprobs: the epilogues of its three kinds of
// matrix products. `rows` are the tokens that are not ignored, a chunk is some consecutive classes.
#pragma once

#include <cstdint>

#include "../gemm/gemm.h"
#include "cross_entropy.h"

namespace fusedops {

// logits = sums + bias, not rounded.
struct ChunkLogits {
  GemmCall product;      // m = rows, n = classes of the chunk; store and context are filled in
  const void* bias;      // [n] or null
  void* logits;          // [m, n] of the accumulation dtype
  int64_t row_stride;    // of logits
  const int64_t* index;  // [m], the row of logits of each row, or null: in order
};

// The gradient of the logits, which themselves do not reach memory.
struct ChunkGradient {
  GemmCall product;             // as above
  const void* bias;             // [n] or null
  const int64_t* target;        // [m]
  const RowGradient* gradient;  // [m]
  int64_t first;                // class of column 0
  LossOptions options;
  void* grad_logits;  // [m, n]
};

// The same from logits that were kept.
struct KeptGradient {
  const void* logits;           // of the accumulation dtype, from the chunk's first class on
  int64_t row_stride;           // of logits
  const int64_t* index;         // [rows] or null, as above
  const int64_t* target;        // [rows]
  const RowGradient* gradient;  // [rows]
  int64_t first;                // class of column 0
  LossOptions options;
  void* grad_logits;  // [rows, columns]
  int64_t rows;
  int64_t columns;
  DType dtype;
};

// sums += A * B, or on the last chunk output = sums + A * B.
struct ChunkSum {
  GemmCall product;
  void* sums;    // [m, n] of the accumulation dtype
  void* output;  // [m, n] or null; may be `sums`
  bool first;    // sums is 0 so far
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(chunk_logits, const ChunkLogits&)
FUSEDOPS_DECLARE_ISA(chunk_gradient, const ChunkGradient&)
FUSEDOPS_DECLARE_ISA(kept_gradient, const KeptGradient&)
FUSEDOPS_DECLARE_ISA(chunk_sum, const ChunkSum&)
