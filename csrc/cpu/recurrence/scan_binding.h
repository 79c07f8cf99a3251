// What the bindings of selective_state_space and selective_scan share: arguments in the
// accumulation dtype, and the steps.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"
#include "../../common/sequences.h"
#include "scan_steps.h"

namespace fusedops {

using Maybe = std::optional<at::Tensor>;

inline TokenRows rows_of(const at::Tensor& rows) {
  return {data(rows), rows.defined() ? rows.stride(0) : 0};
}

inline at::Tensor maybe_rows(const Maybe& tensor, at::ScalarType type) {
  return tensor.has_value() && tensor->defined() ? token_rows(tensor->to(type)) : at::Tensor();
}

// A parameter as a dense tensor of a wider dtype, or undefined.
inline at::Tensor widened(const Maybe& tensor, at::ScalarType type) {
  return tensor.has_value() && tensor->defined() ? tensor->to(type).contiguous() : at::Tensor();
}

// A gradient in the dtype of its tensor where it was asked for.
inline at::Tensor narrowed(const at::Tensor& grad, const Maybe& tensor, bool wanted) {
  return wanted ? grad.to(tensor->scalar_type()) : at::Tensor();
}

// Steps from dt, and the gradient of dt from theirs.
struct Steps {
  Steps(const at::Tensor& dt_in, const Maybe& bias_in, at::ScalarType type, bool softplus,
        double least, double most)
      : dt(widened(dt_in, type)), bias(widened(bias_in, type)), steps(at::empty_like(dt)) {
    call = {data(dt), data(bias),  dt.size(0) * dt.size(1), dt.size(2), softplus, least,
            most,     dtype_of(dt)};
    FUSEDOPS_CALL_ISA(scan_steps_forward, call, mutable_data(steps));
  }

  // Turns the gradient of the steps into that of dt, in place; returns that of the bias.
  at::Tensor backward(const at::Tensor& grads, bool of_bias) const {
    at::Tensor partials, grad_bias;
    if (of_bias) {
      partials = at::empty({Chunks(call.rows).count, call.columns}, dt.options());
      grad_bias = at::empty({call.columns}, dt.options());
    }
    FUSEDOPS_CALL_ISA(scan_steps_backward, call, mutable_data(grads), mutable_data(partials),
                      mutable_data(grad_bias));
    return grad_bias;
  }

  at::Tensor dt, bias, steps;
  ScanSteps call;
};

}  // namespace fusedops
