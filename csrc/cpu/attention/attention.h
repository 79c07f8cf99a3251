// Interface between the bindings of the attention ops and their kernels. The three ops differ in
// where a sequence's tokens lie and how many it has: a table of sequences tells.
//
// Strides count elements; the last dim of queries, keys, values, outputs is contiguous.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"
#include "../../common/philox.h"

namespace fusedops {

// Where the vector of a head and a token lies: data + head * head_stride + token * token_stride.
struct HeadsOf {
  int64_t head_stride;
  int64_t token_stride;
};

enum class MaskKind { none, boolean, data, wide };  // `wide`: the accumulation dtype

struct AttentionSequence {
  const void* query;
  const void* key;
  const void* value;
  const void* mask;    // or null
  const void* slopes;  // [heads], accumulation dtype, or null
  void* output;        // the gradient of the output in the backward
  void* remainder;     // what the output's rounding took, its layout and dtype, or null
  void* lse;           // [heads, rows] with lse_head_stride, accumulation dtype
  void* lse_parts;     // [heads, rows, 2] likewise: maximum, log2 of the sum; or null
  void* grad_query;    // backward: each or null
  void* grad_key;
  void* grad_value;
  void* grad_scores;  // backward: [heads, rows, columns] dense, accumulation dtype, or null
  const void* delta;  // backward: as lse
  int64_t rows;       // queries
  int64_t columns;    // keys
  int64_t offset;     // query i has the position of key i + offset
  // Where dropout counts scores of head 0: row i's begin at dropout_first + i * dropout_row_stride,
  // or dropout_first + dropout_rows[i]; column j is the j-th of them, or number dropout_columns[j].
  int64_t dropout_first;
  const int64_t* dropout_rows;     // or null
  const int64_t* dropout_columns;  // or null, as dropout_rows
};

struct AttentionCall {
  const AttentionSequence* sequences;
  int64_t sequence_count;
  int64_t heads;
  int64_t key_heads;
  int64_t size;        // of queries and keys
  int64_t value_size;  // of values and outputs
  HeadsOf query, key, value, output;
  HeadsOf grad_query, grad_key, grad_value;
  int64_t lse_head_stride;
  MaskKind mask_kind;
  int64_t mask_head_stride, mask_row_stride, mask_column_stride;
  const void* sinks;  // [heads], accumulation dtype, or null
  Dropout dropout;
  int64_t dropout_head_stride;  // from a head to the next in the counting of dropout
  int64_t dropout_row_stride;
  double scale;
  double softcap;         // 0: none
  int64_t window_left;    // -1: unbounded
  int64_t window_right;   // -1: unbounded
  bool lse_has_gradient;  // backward
  DType dtype;

  // Query heads that read one key head.
  int64_t groups() const { return key_heads == 0 ? 0 : heads / key_heads; }
};

// sum over the head of output * grad_output - grad_lse, for each row.
struct AttentionDelta {
  const void* output;       // [batch, heads, rows, size], strides below
  const void* remainder;    // likewise and of its strides, or null
  const void* grad_output;  // likewise
  const void* grad_lse;     // [batch, heads, rows] dense, accumulation dtype, or null
  void* delta;              // [batch, heads, rows] dense, accumulation dtype
  int64_t batch, heads, rows, size;
  int64_t output_strides[3];
  int64_t grad_strides[3];
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(attention_forward, const AttentionCall&)
FUSEDOPS_DECLARE_ISA(attention_few_queries, const AttentionCall&)
FUSEDOPS_DECLARE_ISA(attention_backward, const AttentionCall&)
FUSEDOPS_DECLARE_ISA(attention_delta, const AttentionDelta&)
