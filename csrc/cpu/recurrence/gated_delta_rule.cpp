// Binding of gated_delta_rule on the CPU and of its backward. Arguments were checked by
// fusedops/ops/gated_delta_rule.py; the ends of packed sequences are checked here again, since
// compiled code does not pass there.
#include "gated_delta_rule.h"

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../../common/binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The arguments as the kernels read them, and what holds their memory.
struct Inputs {
  at::Tensor query, key, value, gate, beta, state, ends;
  DeltaRule call{};

  Inputs(const at::Tensor& query_in, const at::Tensor& key_in, const at::Tensor& value_in,
         const at::Tensor& gate_in, const at::Tensor& beta_in, const Optional& initial_state,
         const Optional& cu_seqlens, double scale, bool qk_norm)
      : query(with_dense_heads(query_in)),
        key(with_dense_heads(key_in)),
        value(with_dense_heads(value_in)),
        gate(gate_in.to(statistics_type(query)).contiguous()),
        beta(beta_in.to(statistics_type(query)).contiguous()),
        state(dense(initial_state)),
        ends(dense(cu_seqlens)) {
    call.query = rows(query);
    call.key = rows(key);
    call.value = rows(value);
    call.gate = data(gate);
    call.beta = data(beta);
    call.initial_state = data(state);
    call.batch = value.size(0);
    call.tokens = value.size(1);
    call.heads = value.size(2);
    call.key_heads = key.size(2);
    call.key_dim = key.size(3);
    call.value_dim = value.size(3);
    call.sequences = call.batch;
    call.scale = scale;
    call.qk_norm = qk_norm;
    call.per_channel = gate.dim() == 4;
    call.dtype = dtype_of(query);
    if (!ends.defined()) return;
    call.ends = ends.const_data_ptr<int64_t>();
    call.sequences = ends.size(0) - 1;
    bool right = call.ends[0] == 0 && call.ends[call.sequences] == call.tokens;
    for (int64_t n = 0; n < call.sequences; ++n) right &= call.ends[n] <= call.ends[n + 1];
    TORCH_CHECK_VALUE(right, "gated_delta_rule: cu_seqlens must rise from 0 to ", call.tokens);
  }

  static at::Tensor with_dense_heads(const at::Tensor& tensor) {
    return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
  }

  static DeltaRows rows(const at::Tensor& tensor) {
    return {data(tensor), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
  }

  at::Tensor new_state() const {
    return at::empty({call.sequences, call.heads, call.key_dim, call.value_dim}, gate.options());
  }
};

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& value, const at::Tensor& gate,
                                           const at::Tensor& beta, const Optional& initial_state,
                                           const Optional& cu_seqlens, double scale, bool qk_norm) {
  Inputs in(query, key, value, gate, beta, initial_state, cu_seqlens, scale, qk_norm);
  auto output = at::empty(value.sizes(), value.options());
  auto state = in.new_state();
  in.call.output = mutable_data(output);
  in.call.final_state = mutable_data(state);
  FUSEDOPS_CALL_ISA(gated_delta_rule, in.call);
  return {output, state};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const Optional& grad_output, const Optional& grad_final, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& gate, const at::Tensor& beta,
    const Optional& initial_state, const Optional& cu_seqlens, double scale, bool qk_norm,
    c10::List<bool> output_mask) {
  Inputs in(query, key, value, gate, beta, initial_state, cu_seqlens, scale, qk_norm);
  auto of_output = gradient(grad_output, value);
  if (!of_output.defined()) of_output = at::zeros(value.sizes(), value.options());
  const auto of_state = gradient(grad_final, in.gate);
  const auto made = [&](int place, at::IntArrayRef sizes, const at::Tensor& like) {
    return output_mask[place] ? at::empty(sizes, like.options()) : at::Tensor();
  };
  auto grad_query = made(0, query.sizes(), query);
  auto grad_key = made(1, key.sizes(), key);
  auto grad_value = made(2, value.sizes(), value);
  auto grad_gate = made(3, gate.sizes(), in.gate);
  auto grad_beta = made(4, beta.sizes(), in.beta);
  auto grad_initial = output_mask[5] ? in.new_state() : at::Tensor();
  auto& call = in.call;
  call.grad_output = data(of_output);
  call.grad_final = data(of_state);
  call.grad_query = mutable_data(grad_query);
  call.grad_key = mutable_data(grad_key);
  call.grad_value = mutable_data(grad_value);
  call.grad_gate = mutable_data(grad_gate);
  call.grad_beta = mutable_data(grad_beta);
  call.grad_initial = mutable_data(grad_initial);
  FUSEDOPS_CALL_ISA(gated_delta_rule_backward, call);
  if (grad_gate.defined()) grad_gate = grad_gate.to(gate.scalar_type());
  if (grad_beta.defined()) grad_beta = grad_beta.to(beta.scalar_type());
  return {grad_query, grad_key, grad_value, grad_gate, grad_beta, grad_initial};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("gated_delta_rule", forward);
  m.impl("gated_delta_rule_backward", backward);
}

}  // namespace fusedops
