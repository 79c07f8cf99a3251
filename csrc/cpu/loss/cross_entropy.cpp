// Binding of cross_entropy on the CPU: fusedops_cpp::cross_entropy and
// fusedops_cpp::cross_entropy_backward.
#include <array>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cross_entropy_binding.h"

namespace fusedops {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& logits,
                                                       const at::Tensor& target,
                                                       int64_t ignore_index, double label_smoothing,
                                                       double z_loss, double softcap,
                                                       std::string_view reduction,
                                                       at::ScalarType dtype) {
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  // The contract requires a floating dtype and cannot state which two of them.
  TORCH_CHECK_VALUE(dtype == logits.scalar_type() || dtype == statistics_type(logits),
                    "cross_entropy: dtype must be that of logits or of its statistics");
  const auto x = logits.contiguous();
  const auto targets = target.contiguous();
  const int64_t rows = targets.numel(), classes = x.size(-1);
  const auto* target_data = targets.const_data_ptr<int64_t>();
  const int64_t count = count_targets("cross_entropy", target_data, rows, classes, ignore_index);
  auto shape = target.sizes().vec();
  shape.push_back(2);
  auto statistics = at::empty(shape, x.options().dtype(statistics_type(x)));
  std::vector<RowSums> sums(rows);
  const CrossEntropySums arguments{data(x), classes, nullptr, target_data, sums.data(),
                                   rows,    classes, 0,       options,     dtype_of(x)};
  FUSEDOPS_CALL_ISA(cross_entropy_sums, arguments);
  auto loss = finish_loss(sums.data(), targets, classes, count, options, reduction_of(reduction),
                          dtype, statistics);
  return {loss, number(count, statistics.scalar_type()), statistics};
}

at::Tensor backward(const std::optional<at::Tensor>& grad_loss, const at::Tensor& logits,
                    const at::Tensor& target, const at::Tensor& statistics, const at::Tensor& count,
                    int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                    std::string_view reduction, at::ScalarType /*dtype*/,
                    std::array<bool, 1> output_mask) {
  if (!output_mask[0]) return {};
  const auto x = logits.contiguous();
  const auto targets = target.contiguous();
  const auto dense_statistics = statistics.contiguous();
  auto grad = grad_loss->to(statistics.scalar_type()).contiguous();
  if (reduction_of(reduction) == Reduction::mean) grad = grad.div(count);
  const int64_t rows = targets.numel(), classes = x.size(-1);
  count_targets("cross_entropy", targets.const_data_ptr<int64_t>(), rows, classes, ignore_index);
  auto grad_logits = at::empty(x.sizes(), x.options());
  const CrossEntropyBackward arguments{data(x),
                                       targets.const_data_ptr<int64_t>(),
                                       data(dense_statistics),
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
