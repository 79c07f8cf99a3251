// Binding of cross_entropy on the CPU: fusedops_cpp::cross_entropy and
// fusedops_cpp::cross_entropy_backward. Shapes were checked by fusedops/ops/cross_entropy.py.
#include <array>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include "cross_entropy_binding.h"

namespace fusedops {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& logits,
                                                       const at::Tensor& target,
                                                       int64_t ignore_index, double label_smoothing,
                                                       double z_loss, double softcap,
                                                       std::string_view reduction) {
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const auto x = logits.contiguous();
  const auto targets = target.contiguous();
  const int64_t rows = targets.numel(), classes = x.size(-1);
  const auto* target_data = targets.const_data_ptr<int64_t>();
  const int64_t count = count_targets("cross_entropy", target_data, rows, classes, ignore_index);
  const auto statistics = x.options().dtype(statistics_type(x));
  const bool sum = is_sum(reduction);
  auto loss = at::empty(sum ? at::IntArrayRef() : target.sizes(), statistics);
  auto lse = at::empty(target.sizes(), statistics);
  std::vector<RowSums> sums(rows);
  const CrossEntropySums arguments{data(x), classes, nullptr, target_data, sums.data(),
                                   rows,    classes, 0,       options,     dtype_of(x)};
  FUSEDOPS_CALL_ISA(cross_entropy_sums, arguments);
  finish_rows(sums.data(), targets, classes, options, sum, loss, lse);
  return {loss, at::scalar_tensor(count, targets.options()), lse};
}

at::Tensor backward(const std::optional<at::Tensor>& grad_loss, const at::Tensor& logits,
                    const at::Tensor& target, const at::Tensor& lse, int64_t ignore_index,
                    double label_smoothing, double z_loss, double softcap,
                    std::string_view /*reduction*/, std::array<bool, 1> output_mask) {
  if (!output_mask[0]) return {};
  const auto x = logits.contiguous();
  const auto targets = target.contiguous();
  const auto lse_dense = lse.contiguous();
  const auto grad = grad_loss->to(lse.scalar_type()).contiguous();
  const int64_t rows = targets.numel(), classes = x.size(-1);
  auto grad_logits = at::empty(x.sizes(), x.options());
  const CrossEntropyBackward arguments{data(x),
                                       targets.const_data_ptr<int64_t>(),
                                       data(lse_dense),
                                       data(grad),
                                       grad.dim() == 0 && target.dim() > 0 ? 0 : 1,
                                       mutable_data(grad_logits),
                                       rows,
                                       classes,
                                       {ignore_index, label_smoothing, z_loss, softcap},
                                       dtype_of(x)};
  FUSEDOPS_CALL_ISA(cross_entropy_backward, arguments);
  return grad_logits;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("cross_entropy", forward);
  m.impl("cross_entropy_backward", backward);
}

}  // namespace fusedops
