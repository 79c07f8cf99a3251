// Bindings of cross_entropy and token_logprobs on the CPU: fusedops_cpp::cross_entropy,
// fusedops_cpp::token_logprobs and their backwards.
#include <array>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cross_entropy_binding.h"

namespace fusedops {
namespace {

// Logits and their targets, dense.
struct Rows {
  Rows(const char* op, const at::Tensor& logits, const at::Tensor& target_of_rows,
       int64_t ignore_index)
      : x(logits.contiguous()), target(target_of_rows.contiguous()), classes(x.size(-1)) {
    const auto* data = target.const_data_ptr<int64_t>();
    count = count_targets(op, data, target.numel(), classes, ignore_index);
  }

  std::vector<RowSums> sums(const LossOptions& options) const {
    std::vector<RowSums> sums(target.numel());
    const auto* targets = target.const_data_ptr<int64_t>();
    const CrossEntropySums arguments{data(x),        classes, nullptr, targets, sums.data(),
                                     target.numel(), classes, 0,       options, dtype_of(x)};
    FUSEDOPS_CALL_ISA(cross_entropy_sums, arguments);
    return sums;
  }

  at::Tensor gradient(const std::vector<RowGradient>& of_rows, const LossOptions& options) const {
    auto grad_logits = at::empty(x.sizes(), x.options());
    const CrossEntropyBackward arguments{data(x),        target.const_data_ptr<int64_t>(),
                                         of_rows.data(), mutable_data(grad_logits),
                                         target.numel(), classes,
                                         options,        dtype_of(x)};
    FUSEDOPS_CALL_ISA(cross_entropy_backward, arguments);
    return grad_logits;
  }

  at::Tensor x;
  at::Tensor target;
  int64_t classes;
  int64_t count;  // of rows that are not ignored
};

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
  const Rows rows("cross_entropy", logits, target, ignore_index);
  auto shape = target.sizes().vec();
  shape.push_back(2);
  auto statistics = at::empty(shape, logits.options().dtype(statistics_type(logits)));
  const auto sums = rows.sums(options);
  auto loss = finish_loss(sums.data(), rows.target, rows.classes, rows.count, options,
                          reduction_of(reduction), dtype, statistics);
  return {loss, number(rows.count, statistics.scalar_type()), statistics};
}

at::Tensor backward(const std::optional<at::Tensor>& grad_loss, const at::Tensor& logits,
                    const at::Tensor& target, const at::Tensor& statistics, const at::Tensor& count,
                    int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                    std::string_view reduction, at::ScalarType /*dtype*/,
                    std::array<bool, 1> output_mask) {
  if (!output_mask[0]) return {};
  auto grad = grad_loss->to(statistics.scalar_type());
  if (reduction_of(reduction) == Reduction::mean) grad = grad.div(count);
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const Rows rows("cross_entropy", logits, target, ignore_index);
  return rows.gradient(row_gradients(grad, statistics, options, rows.classes), options);
}

std::tuple<at::Tensor, at::Tensor> token_logprobs(const at::Tensor& logits,
                                                  const at::Tensor& target, int64_t ignore_index,
                                                  double temperature, double softcap) {
  const auto options = token_options(ignore_index, temperature, softcap);
  const Rows rows("token_logprobs", logits, target, ignore_index);
  auto shape = target.sizes().vec(), shape_of_tokens = shape;
  shape.push_back(4);
  shape_of_tokens.insert(shape_of_tokens.begin(), 3);
  const auto wide = logits.options().dtype(statistics_type(logits));
  auto tokens = at::empty(shape_of_tokens, wide), statistics = at::empty(shape, wide);
  finish_tokens(rows.sums(options).data(), rows.target, options, tokens, statistics);
  return {tokens, statistics};
}

at::Tensor token_logprobs_backward(const std::optional<at::Tensor>& grad_tokens,
                                   const at::Tensor& logits, const at::Tensor& target,
                                   const at::Tensor& statistics, int64_t ignore_index,
                                   double temperature, double softcap,
                                   std::array<bool, 1> output_mask) {
  if (!output_mask[0]) return {};
  const auto options = token_options(ignore_index, temperature, softcap);
  const Rows rows("token_logprobs", logits, target, ignore_index);
  return rows.gradient(token_gradients(*grad_tokens, statistics, options), options);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("cross_entropy", forward);
  m.impl("cross_entropy_backward", backward);
  m.impl("token_logprobs", token_logprobs);
  m.impl("token_logprobs_backward", token_logprobs_backward);
}

}  // namespace fusedops
