// Interface between the bindings of swiglu and geglu and their kernels.
#pragma once

#include <cstdint>

#include "../../common/activation.h"
#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// [rows, columns], the elements of a row next to each other.
struct GluRows {
  const void* data;
  int64_t stride;  // elements from row to row
};

struct GluForward {
  GluRows gate;
  GluRows up;
  void* output;  // [rows, columns] dense
  int64_t rows;
  int64_t columns;
  Activation activation;
  DType dtype;
};

struct GluBackward {
  GluRows grad_output;
  GluRows gate;
  GluRows up;
  void* grad_gate;  // [rows, columns] dense, or null
  void* grad_up;    // [rows, columns] dense, or null
  int64_t rows;
  int64_t columns;
  Activation activation;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(glu_forward, const GluForward&)
FUSEDOPS_DECLARE_ISA(glu_backward, const GluBackward&)
