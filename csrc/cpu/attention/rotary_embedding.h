// Interface between the binding of rotary_embedding and its kernel, which is the backward's too.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// [batch, heads, length, head_dim]; strides in elements, that of the last dimension is 1.
struct RotaryHeads {
  const void* input;  // null: nothing to do
  void* output;
  int64_t heads;
  int64_t input_strides[3];  // batch, head, position
  int64_t output_strides[3];
};

struct RotaryEmbedding {
  RotaryHeads tensors[2];  // query and key
  const void* cos;         // [batch, length, rotary_dim]
  const void* sin;
  int64_t cos_strides[2];  // batch, position
  int64_t sin_strides[2];
  int64_t batch;
  int64_t length;
  int64_t head_dim;
  int64_t rotary_dim;
  bool interleaved;
  bool inverse;  // the transposed map: the backward
  DType dtype;
  DType table_dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(rotary_embedding, const RotaryEmbedding&)
