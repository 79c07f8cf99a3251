// Interface between the binding of moe_router_loss and its kernels.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct MoeRouterLossInput {
  const void* logits;   // [tokens, experts]
  const void* weights;  // [tokens / tokens_per_weight, experts] of the accumulation dtype, or null
  double z_weight;
  const bool* mask;  // [tokens], or null
  bool sigmoid;
  int64_t tokens;
  int64_t experts;
  int64_t tokens_per_weight;
  DType dtype;
};

struct MoeRouterLossForward {
  MoeRouterLossInput input;
  double* partials;  // one per chunk of tokens
};

struct MoeRouterLossBackward {
  MoeRouterLossInput input;
  double grad_loss;
  void* grad_logits;  // [tokens, experts]
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(moe_router_loss_forward, const MoeRouterLossForward&)
FUSEDOPS_DECLARE_ISA(moe_router_loss_backward, const MoeRouterLossBackward&)
