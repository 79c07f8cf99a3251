// Interface between the binding of causal_conv1d and its kernels.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// Rows of tokens are [tokens, channels], states [sequences, width - 1, channels]; both have the
// dtype of the input. Parameters and their gradients have the accumulation dtype.
struct CausalConv1d {
  const void* input;
  int64_t input_stride;       // elements from row to row
  const void* weight;         // [width, channels]
  const void* bias;           // [channels] or null
  const void* initial_state;  // or null
  const int64_t* starts;      // [sequences + 1] rows
  int64_t sequences;
  int64_t channels;
  int64_t width;
  bool silu;
  DType dtype;

  int64_t history() const { return width - 1; }
};

struct CausalConv1dForward {
  CausalConv1d call;
  void* output;  // dense rows
  void* state;
};

struct CausalConv1dBackward {
  CausalConv1d call;
  const void* grad_output;  // or null
  int64_t grad_output_stride;
  const void* grad_state;    // or null
  void* grad_input;          // dense rows, or null
  void* grad_initial_state;  // or null
  void* partials;            // [chunks, width + 1, channels], or null
  void* grad_parameters;     // [width + 1, channels]: of the weight, then of the bias
};

// Tokens [begin, end) of a sequence: the unit of work, and of the sums of gradients. A sequence
// without tokens has one that is empty.
struct ConvChunk {
  int64_t sequence;
  int64_t begin;
  int64_t end;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(causal_conv1d_forward, const CausalConv1dForward&, const ConvChunk* chunks,
                     int64_t count)
FUSEDOPS_DECLARE_ISA(causal_conv1d_backward, const CausalConv1dBackward&, const ConvChunk* chunks,
                     int64_t count)
