// The steps of state space models: step = clamp(softplus(dt + bias), least, most), and their
// gradients. All tensors have the accumulation dtype.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

// Rows of tokens with contiguous columns; rows lie `stride` elements apart.
struct TokenRows {
  const void* data;  // or null
  int64_t stride;
};

struct ScanSteps {
  const void* dt;    // [rows, columns]
  const void* bias;  // [columns] or null
  int64_t rows;
  int64_t columns;
  bool softplus;
  double least;
  double most;
  DType dtype;  // float or double
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(scan_steps_forward, const ScanSteps&, void* steps)
// Turns the gradients of the steps into those of dt, in place, and adds them up over the rows:
// `partials` is [chunks of rows, columns] and `grad_bias` [columns], both null without a bias.
FUSEDOPS_DECLARE_ISA(scan_steps_backward, const ScanSteps&, void* grads, void* partials,
                     void* grad_bias)
