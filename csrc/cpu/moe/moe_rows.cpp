// Bindings of moe_permute, moe_unpermute and moe_relayout on the CPU. Shapes were checked by
// fusedops/ops; the positions of a plan are looked through here, because a wrong one would write
// outside the output.
#include "moe_rows.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// A matrix whose rows hold together; rows may be apart.
at::Tensor with_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) <= 1 ? matrix : matrix.contiguous();
}

MoeRows rows_of(const at::Tensor& matrix) {
  return {data(matrix), matrix.defined() ? matrix.stride(0) : 0};
}

// The index tensors of a plan, dense and in bounds.
class Plan {
 public:
  Plan(const char* op, const at::Tensor& positions, const at::Tensor& offsets)
      : positions_(positions.contiguous()), tokens_(positions.size(0)), top_k_(positions.size(1)) {
    const int64_t rows = positions_.numel();
    const auto* row = positions_.const_data_ptr<int32_t>();
    int32_t least = 0, most = -1;
    for (int64_t slot = 0; slot < rows; ++slot) {
      least = std::min(least, row[slot]);
      most = std::max(most, row[slot]);
    }
    TORCH_CHECK_VALUE(least >= 0 && most < rows, op, ": plan.positions must be in [0, ", rows,
                      "), got ", least < 0 ? least : most);
    const auto last = offsets.narrow(0, offsets.size(0) - 1, 1);
    real_ = *last.const_data_ptr<int32_t>();
    TORCH_CHECK_VALUE(real_ >= 0 && real_ <= rows, op, ": plan.offsets must end in [0, ", rows,
                      "], got ", real_);
  }

  MoeSlots slots() const { return {positions_.const_data_ptr<int32_t>(), tokens_, top_k_, real_}; }
  int64_t tokens() const { return tokens_; }
  int64_t rows() const { return positions_.numel(); }

 private:
  at::Tensor positions_;
  int64_t tokens_;
  int64_t top_k_;
  int64_t real_;
};

at::Tensor scatter(const Plan& plan, const at::Tensor& input) {
  auto output = at::empty({plan.rows(), input.size(1)}, input.options());
  if (output.numel() > 0) {
    const auto rows = with_dense_rows(input);
    const auto bytes = static_cast<int64_t>(input.element_size());
    const MoeScatter arguments{plan.slots(), data(rows), rows.stride(0) * bytes,
                               mutable_data(output), input.size(1) * bytes};
    FUSEDOPS_CALL_ISA(moe_scatter, arguments);
  }
  return output;
}

at::Tensor combine(const Plan& plan, const at::Tensor& input, const Optional& probs) {
  auto output = at::empty({plan.tokens(), input.size(1)}, input.options());
  if (output.numel() > 0) {
    const auto rows = with_dense_rows(input);
    const auto weights = dense(probs);
    const MoeCombine arguments{plan.slots(),         rows_of(rows), data(weights),
                               mutable_data(output), input.size(1), dtype_of(input)};
    FUSEDOPS_CALL_ISA(moe_combine, arguments);
  }
  return output;
}

at::Tensor moe_permute(const at::Tensor& input, const at::Tensor& positions,
                       const at::Tensor& offsets) {
  return scatter(Plan("moe_permute", positions, offsets), input);
}

at::Tensor moe_permute_backward(const Optional& grad_output, const at::Tensor& positions,
                                const at::Tensor& offsets, c10::List<bool> output_mask) {
  if (!output_mask[0]) return {};
  return combine(Plan("moe_permute", positions, offsets), *grad_output, std::nullopt);
}

at::Tensor moe_unpermute(const at::Tensor& input, const Optional& probs,
                         const at::Tensor& positions, const at::Tensor& offsets) {
  return combine(Plan("moe_unpermute", positions, offsets), input, probs);
}

std::tuple<at::Tensor, at::Tensor> moe_unpermute_backward(
    const Optional& grad_output, const Optional& input, const Optional& probs,
    const at::Tensor& positions, const at::Tensor& offsets, c10::List<bool> output_mask) {
  const Plan plan("moe_unpermute", positions, offsets);
  const at::Tensor& grad = *grad_output;
  const bool weighted = probs.has_value() && probs->defined();
  if (!weighted) return {output_mask[0] ? scatter(plan, grad) : at::Tensor(), at::Tensor()};
  at::Tensor grad_input, grad_probs;
  if (output_mask[0]) grad_input = at::empty({plan.rows(), grad.size(1)}, grad.options());
  if (output_mask[1]) grad_probs = at::empty(probs->sizes(), probs->options());
  if (plan.rows() > 0 && (output_mask[0] || output_mask[1])) {
    const auto incoming = with_dense_rows(grad);
    const auto rows = output_mask[1] ? with_dense_rows(*input) : at::Tensor();
    const auto weights = probs->contiguous();
    const MoeCombineBackward arguments{plan.slots(),
                                       rows_of(incoming),
                                       rows_of(rows),
                                       data(weights),
                                       mutable_data(grad_input),
                                       mutable_data(grad_probs),
                                       grad.size(1),
                                       dtype_of(grad)};
    FUSEDOPS_CALL_ISA(moe_combine_backward, arguments);
  }
  return {grad_input, grad_probs};
}

at::Tensor moe_relayout(const at::Tensor& input, const at::Tensor& index,
                        const at::Tensor& /*inverse*/) {
  auto output = at::empty({index.size(0), input.size(1)}, input.options());
  if (output.numel() > 0) {
    const auto rows = with_dense_rows(input);
    const auto places = index.contiguous();
    const auto bytes = static_cast<int64_t>(input.element_size());
    const auto* place = places.const_data_ptr<int32_t>();
    const auto most = *std::max_element(place, place + places.numel());
    TORCH_CHECK_VALUE(most < input.size(0), "moe_relayout: index must be below ", input.size(0),
                      ", got ", most);
    const MoeGather arguments{place,
                              index.size(0),
                              data(rows),
                              rows.stride(0) * bytes,
                              mutable_data(output),
                              input.size(1) * bytes};
    FUSEDOPS_CALL_ISA(moe_gather, arguments);
  }
  return output;
}

at::Tensor moe_relayout_backward(const Optional& grad_output, const at::Tensor& index,
                                 const at::Tensor& inverse, c10::List<bool> output_mask) {
  return output_mask[0] ? moe_relayout(*grad_output, inverse, index) : at::Tensor();
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("moe_permute", moe_permute);
  m.impl("moe_permute_backward", moe_permute_backward);
  m.impl("moe_unpermute", moe_unpermute);
  m.impl("moe_unpermute_backward", moe_unpermute_backward);
  m.impl("moe_relayout", moe_relayout);
  m.impl("moe_relayout_backward", moe_relayout_backward);
}

}  // namespace fusedops
