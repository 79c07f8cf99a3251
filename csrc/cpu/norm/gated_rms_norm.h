// Interface between the binding of gated_rms_norm and its kernels.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// [rows, groups * size], the elements of a row next to each other.
struct GatedRows {
  const void* data;
  int64_t stride;  // elements from row to row
};

struct GatedNormForward {
  GatedRows input;
  GatedRows gate;
  const void* weight;  // [groups * size] or null
  void* output;        // [rows, groups * size] dense
  void* rstd;          // [rows, groups], accumulation dtype
  int64_t rows;
  int64_t groups;
  int64_t size;
  double eps;
  bool norm_before_gate;
  bool is_silu;  // the gate's activation; else sigmoid
  DType dtype;
  DType weight_dtype;
};

struct GatedNormBackward {
  GatedRows grad_output;
  GatedRows input;
  GatedRows gate;
  const void* weight;  // [groups * size] or null
  const void* rstd;    // [rows, groups], accumulation dtype
  void* grad_input;    // [rows, groups * size] dense, or null
  void* grad_gate;     // [rows, groups * size] dense, or null
  void* grad_weight;   // [groups * size] or null
  void* partials;      // [chunks of rows, groups * size]; null without grad_weight
  int64_t rows;
  int64_t groups;
  int64_t size;
  bool norm_before_gate;
  bool is_silu;
  DType dtype;
  DType weight_dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(gated_norm_forward, const GatedNormForward&)
FUSEDOPS_DECLARE_ISA(gated_norm_backward, const GatedNormBackward&)
