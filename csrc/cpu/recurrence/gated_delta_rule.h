// Interface between the binding of gated_delta_rule and its kernels.
//
// Strides count elements and are those of batch, token and head; the last dim is contiguous. Other
// tensors are dense. "Wide" is float, double for float64.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct DeltaRows {
  const void* data;
  int64_t strides[3];
};

struct DeltaRule {
  DeltaRows query, key, value;
  const void* gate;           // wide [batch, tokens, heads] or [batch, tokens, heads, key_dim]
  const void* beta;           // wide [batch, tokens, heads]
  const void* initial_state;  // wide [sequences, heads, key_dim, value_dim], or null
  const int64_t* ends;        // of packed sequences, or null
  int64_t batch, tokens, heads, key_heads, key_dim, value_dim, sequences;
  double scale;
  bool qk_norm;
  bool per_channel;
  DType dtype;
  // Forward.
  void* output;
  void* final_state;
  // Backward: the gradients of the output and of the final state, the latter or null.
  const void* grad_output;
  const void* grad_final;
  // Those of the arguments, of gate and beta wide; each or null.
  void* grad_query;
  void* grad_key;
  void* grad_value;
  void* grad_gate;
  void* grad_beta;
  void* grad_initial;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(gated_delta_rule, const DeltaRule&)
FUSEDOPS_DECLARE_ISA(gated_delta_rule_backward, const DeltaRule&)
