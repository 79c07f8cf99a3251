// Interface between the binding of moe_route and its kernels.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct MoeRouteOptions {
  int64_t tokens;
  int64_t experts;
  int64_t top_k;  // slots of a token
  bool sigmoid;
  bool normalize;
  double scaling;
  int64_t num_groups;
  int64_t topk_groups;
  bool top2_sum;
  bool expert_choice;   // slot e belongs to expert e
  const int64_t* seed;  // {seed, offset} of the jitter, or null
  double jitter;
  DType dtype;
};

struct MoeRouteForward {
  const void* logits;     // [tokens, experts]
  const void* bias;       // [experts] of the accumulation dtype, or null
  const int32_t* chosen;  // [tokens, top_k], or null
  int32_t* expert_ids;    // [tokens, top_k]
  void* probs;            // [tokens, top_k] of the accumulation dtype, before dropping
  MoeRouteOptions options;
};

struct MoeRouteBackward {
  const void* grad_probs;  // [tokens, top_k] of the accumulation dtype
  const void* logits;
  const int32_t* expert_ids;
  const bool* kept;   // [tokens, top_k], or null
  void* grad_logits;  // [tokens, experts]
  MoeRouteOptions options;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(moe_route_forward, const MoeRouteForward&)
FUSEDOPS_DECLARE_ISA(moe_route_backward, const MoeRouteBackward&)
