// Interface between the binding of selective_state_space and selective_scan and their kernels. The
// latter has heads of one channel, and one group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/dtype.h"
#include "../../common/isa.h"
#include "scan_steps.h"

namespace fusedops {

// Steps, parameters and states have the accumulation dtype, other tensors `dtype`.
struct StateSpace {
  TokenRows input;            // [tokens, heads * head_dim]
  TokenRows b;                // [tokens, groups * state_dim]
  TokenRows c;                // as b
  TokenRows z;                // as input, or null
  const void* steps;          // [tokens, heads]
  const void* a;              // [heads], of selective_scan [heads, state_dim]
  const void* d;              // [heads] or null
  const void* initial_state;  // [sequences, heads, head_dim, state_dim] or null
  const int64_t* starts;      // [sequences + 1] rows
  int64_t sequences;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_dim;
  bool is_scan;
  DType dtype;

  int64_t tokens() const { return starts[sequences]; }
  bool of_single_tokens() const {
    for (int64_t n = 0; n < sequences; ++n) {
      if (starts[n + 1] - starts[n] != 1) return false;
    }
    return true;
  }
  int64_t state_size() const { return head_dim * state_dim; }
  // Heads of a task, all of one group. Their number shows in the bits of the gradients of b and c:
  // it depends on the heads alone.
  int64_t heads_per_task() const {
    return std::min(heads / groups, is_scan ? 128 : std::clamp<int64_t>(heads / 8, 1, 8));
  }
  int64_t tasks_per_group() const {
    return (heads / groups + heads_per_task() - 1) / heads_per_task();
  }
  // Calls run(sequence, first head, number of heads, number of the task in its group).
  template <typename Run>
  void for_task(int64_t task, const Run& run) const {
    const int64_t number = task % tasks_per_group(), group = task / tasks_per_group() % groups;
    const int64_t before = number * heads_per_task(), heads_per_group = heads / groups;
    run(task / tasks_per_group() / groups, group * heads_per_group + before,
        std::min(heads_per_task(), heads_per_group - before), number);
  }
  int64_t num_tasks() const { return sequences * groups * tasks_per_group(); }
};

struct StateSpaceForward {
  StateSpace call;
  void* output;  // dense rows
  void* state;
};

struct StateSpaceBackward {
  StateSpace call;
  TokenRows grad_output;     // or null
  const void* grad_state;    // or null
  void* grad_input;          // dense rows
  void* grad_z;              // dense rows, or null
  void* grad_b;              // dense rows
  void* grad_c;              // dense rows
  void* grad_steps;          // [tokens, heads]
  void* grad_initial_state;  // or null
  void* grad_a;              // as a
  void* grad_d;              // [heads]
  void* shares;              // of b and c: [2, tasks_per_group, tokens, groups * state_dim]
  void* sequence_a;          // [sequences, elements of a]
  void* sequence_d;          // [sequences, heads]
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(selective_state_space_forward, const StateSpaceForward&)
FUSEDOPS_DECLARE_ISA(selective_state_space_backward, const StateSpaceBackward&)
FUSEDOPS_DECLARE_ISA(selective_scan_forward, const StateSpaceForward&)
FUSEDOPS_DECLARE_ISA(selective_scan_backward, const StateSpaceBackward&)
