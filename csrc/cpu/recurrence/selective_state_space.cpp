// Binding of selective_state_space on the CPU: fusedops_cpp::selective_state_space and its
// backward. Arguments were checked by fusedops/ops/selective_state_space.py, but for the values of
// cu_seqlens.
#include "selective_state_space.h"

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "scan_binding.h"

namespace fusedops {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The arguments as the kernels read them.
struct Arguments {
  Arguments(const at::Tensor& input_in, const at::Tensor& dt, const at::Tensor& a_in,
            const at::Tensor& b_in, const at::Tensor& c_in, const Maybe& d_in, const Maybe& z_in,
            const Maybe& dt_bias, const Maybe& initial_state, const Maybe& cu_seqlens,
            bool dt_softplus, double dt_min, double dt_max)
      : type(statistics_type(input_in)),
        input(token_rows(input_in)),
        b(token_rows(b_in)),
        c(token_rows(c_in)),
        z(maybe_rows(z_in, input_in.scalar_type())),
        a(widened(a_in, type)),
        d(widened(d_in, type)),
        state(dense(initial_state)),
        steps(dt, dt_bias, type, dt_softplus, dt_min, dt_max),
        starts(sequence_starts(cu_seqlens, input_in.size(0), input_in.size(1))) {
    call = {rows_of(input),    rows_of(b),
            rows_of(c),        rows_of(z),
            data(steps.steps), data(a),
            data(d),           data(state),
            starts.data(),     static_cast<int64_t>(starts.size()) - 1,
            input_in.size(2),  input_in.size(3),
            b_in.size(2),      b_in.size(3),
            a_in.dim() == 2,   dtype_of(input_in)};
  }

  at::Tensor empty_state() const {
    return at::empty({call.sequences, call.heads, call.head_dim, call.state_dim},
                     input.options().dtype(type));
  }

  at::ScalarType type;
  at::Tensor input, b, c, z, a, d, state;
  Steps steps;
  std::vector<int64_t> starts;
  StateSpace call;
};

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& dt,
                                           const at::Tensor& a, const at::Tensor& b,
                                           const at::Tensor& c, const Maybe& d, const Maybe& z,
                                           const Maybe& dt_bias, const Maybe& initial_state,
                                           const Maybe& cu_seqlens, bool dt_softplus, double dt_min,
                                           double dt_max) {
  const Arguments arguments(input, dt, a, b, c, d, z, dt_bias, initial_state, cu_seqlens,
                            dt_softplus, dt_min, dt_max);
  auto output = at::empty(input.sizes(), input.options());
  auto state = arguments.empty_state();
  if (state.numel() > 0) {
    const StateSpaceForward call{arguments.call, mutable_data(output), mutable_data(state)};
    if (call.call.is_scan) {
      FUSEDOPS_CALL_ISA(selective_scan_forward, call);
    } else {
      FUSEDOPS_CALL_ISA(selective_state_space_forward, call);
    }
  }
  return {output, state};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor, at::Tensor, at::Tensor>;

Gradients backward(const Maybe& grad_output, const Maybe& grad_state, const at::Tensor& input,
                   const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                   const at::Tensor& c, const Maybe& d, const Maybe& z, const Maybe& dt_bias,
                   const Maybe& initial_state, const Maybe& cu_seqlens, bool dt_softplus,
                   double dt_min, double dt_max, c10::List<bool> output_mask) {
  const Arguments arguments(input, dt, a, b, c, d, z, dt_bias, initial_state, cu_seqlens,
                            dt_softplus, dt_min, dt_max);
  const StateSpace& call = arguments.call;
  const auto wide = input.options().dtype(arguments.type);
  const auto grad = maybe_rows(grad_output, input.scalar_type());
  const auto last = widened(grad_state, arguments.type);
  // Without states no kernel runs, and what it would write is zero.
  const bool runs = call.sequences * call.heads * call.head_dim > 0;
  const auto made = [&](at::IntArrayRef sizes, const at::TensorOptions& options) {
    return runs ? at::empty(sizes, options) : at::zeros(sizes, options);
  };
  const auto grad_input = made(input.sizes(), input.options());
  const auto grad_b = made(b.sizes(), b.options()), grad_c = made(c.sizes(), c.options());
  const auto grad_steps = made(dt.sizes(), wide);
  const auto grad_a = made(a.sizes(), wide), grad_d = made({call.heads}, wide);
  at::Tensor grad_z, grad_initial;
  if (output_mask[6]) grad_z = made(input.sizes(), input.options());
  if (output_mask[8]) grad_initial = arguments.empty_state();
  if (runs) {
    const auto shares =
        at::empty({2 * call.tasks_per_group(), call.tokens(), call.groups * call.state_dim}, wide);
    const auto sequence_a = at::empty({call.sequences, a.numel()}, wide);
    const auto sequence_d = at::empty({call.sequences, call.heads}, wide);
    const StateSpaceBackward backward{call,
                                      rows_of(grad),
                                      data(last),
                                      mutable_data(grad_input),
                                      mutable_data(grad_z),
                                      mutable_data(grad_b),
                                      mutable_data(grad_c),
                                      mutable_data(grad_steps),
                                      mutable_data(grad_initial),
                                      mutable_data(grad_a),
                                      mutable_data(grad_d),
                                      mutable_data(shares),
                                      mutable_data(sequence_a),
                                      mutable_data(sequence_d)};
    if (call.is_scan) {
      FUSEDOPS_CALL_ISA(selective_scan_backward, backward);
    } else {
      FUSEDOPS_CALL_ISA(selective_state_space_backward, backward);
    }
  }
  at::Tensor grad_bias;
  if (output_mask[1] || output_mask[7]) {
    grad_bias = arguments.steps.backward(grad_steps, output_mask[7]);
  }
  const auto only = [&](const at::Tensor& tensor, int place) {
    return output_mask[place] ? tensor : at::Tensor();
  };
  return {only(grad_input, 0),
          narrowed(grad_steps, dt, output_mask[1]),
          narrowed(grad_a, a, output_mask[2]),
          only(grad_b, 3),
          only(grad_c, 4),
          narrowed(grad_d, d, output_mask[5]),
          grad_z,
          narrowed(grad_bias, dt_bias, output_mask[7]),
          grad_initial};
}

// A channel as a head of size 1.
Maybe as_heads(const Maybe& tensor, int64_t dim) {
  return tensor.has_value() && tensor->defined() ? tensor->unsqueeze(dim) : at::Tensor();
}

std::tuple<at::Tensor, at::Tensor> scan(const at::Tensor& input, const at::Tensor& dt,
                                        const at::Tensor& a, const at::Tensor& b,
                                        const at::Tensor& c, const Maybe& d, const Maybe& z,
                                        const Maybe& dt_bias, const Maybe& initial_state,
                                        const Maybe& cu_seqlens, bool dt_softplus) {
  const auto [output, state] =
      forward(input.unsqueeze(-1), dt, a, b.unsqueeze(2), c.unsqueeze(2), d, as_heads(z, -1),
              dt_bias, as_heads(initial_state, 2), cu_seqlens, dt_softplus, 0.0, kUnbounded);
  return {output.squeeze(-1), state.squeeze(2)};
}

Gradients scan_backward(const Maybe& grad_output, const Maybe& grad_state, const at::Tensor& input,
                        const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                        const at::Tensor& c, const Maybe& d, const Maybe& z, const Maybe& dt_bias,
                        const Maybe& initial_state, const Maybe& cu_seqlens, bool dt_softplus,
                        c10::List<bool> output_mask) {
  auto grads =
      backward(as_heads(grad_output, -1), as_heads(grad_state, 2), input.unsqueeze(-1), dt, a,
               b.unsqueeze(2), c.unsqueeze(2), d, as_heads(z, -1), dt_bias,
               as_heads(initial_state, 2), cu_seqlens, dt_softplus, 0.0, kUnbounded, output_mask);
  const auto squeeze = [](at::Tensor& grad, int64_t dim) {
    if (grad.defined()) grad = grad.squeeze(dim);
  };
  squeeze(std::get<0>(grads), -1);
  squeeze(std::get<3>(grads), 2);
  squeeze(std::get<4>(grads), 2);
  squeeze(std::get<6>(grads), -1);
  squeeze(std::get<8>(grads), 2);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("selective_state_space", forward);
  m.impl("selective_state_space_backward", backward);
  m.impl("selective_scan", scan);
  m.impl("selective_scan_backward", scan_backward);
}

}  // namespace fusedops
