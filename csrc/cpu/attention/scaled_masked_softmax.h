// Interface between the binding of scaled_masked_softmax and its kernels.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// The dimensions before the last, in the order in which the rows are walked: those over which the
// mask is broadcast come last, so that rows that share a row of the mask follow one another.
struct SoftmaxRows {
  static constexpr int kMostDims = 8;
  int dims;
  int64_t sizes[kMostDims];
  int64_t row_strides[kMostDims];   // in rows of the dense input
  int64_t mask_strides[kMostDims];  // in elements of the mask
  int64_t count;                    // of all rows
  int64_t sharing;                  // rows that share one row of the mask
};

enum class MaskKind { none, keep, additive };

struct ScaledMaskedSoftmaxForward {
  const void* input;  // rows of `columns`, dense
  const void* mask;   // bool, or mask_dtype, or null
  void* output;       // rows of `columns`, dense
  SoftmaxRows rows;
  int64_t columns;
  int64_t queries;       // the size of the dimension before the last
  bool mask_is_per_row;  // one element of the mask is for a whole row
  bool is_causal;
  double scale;
  MaskKind mask_kind;
  DType dtype;
  DType mask_dtype;
};

struct ScaledMaskedSoftmaxBackward {
  const void* grad_output;
  const void* output;
  void* grad_input;  // or null
  // [count / sharing, columns] of mask_dtype, or null; then partials may be null too.
  void* grad_mask;
  void* partials;  // [count / sharing, chunks of `sharing`, columns], accumulation dtype
  SoftmaxRows rows;
  int64_t columns;
  int64_t queries;
  bool is_causal;
  double scale;
  DType dtype;
  DType mask_dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(scaled_masked_softmax_forward, const ScaledMaskedSoftmaxForward&)
FUSEDOPS_DECLARE_ISA(scaled_masked_softmax_backward, const ScaledMaskedSoftmaxBackward&)
