// What the bindings of the losses share: looking through the targets, results and gradients of rows
// whose sums are known.
#pragma once

#include <numeric>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"
#include "cross_entropy.h"

namespace fusedops {

// How many targets are not ignored; throws for one that is no class, nor at least `least`.
inline int64_t count_targets(const char* op, const int64_t* target, int64_t rows, int64_t classes,
                             int64_t ignore_index, int64_t least = 0) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (target[row] == ignore_index) continue;
    TORCH_CHECK_VALUE(target[row] >= least && target[row] < classes, op, ": target must be in [0, ",
                      classes, ") or ignore_index ", ignore_index, ", got ", target[row],
                      " at row ", row);
    ++count;
  }
  return count;
}

// Loss and statistics (largest y, sum of the exponentials relative to it) of each row from its
// sums, 0 where ignored. Without `loss` the losses are added in order, in double, and their sum is
// returned.
template <typename A>
inline double finish_rows(const RowSums* sums, const int64_t* target, int64_t rows, int64_t classes,
                          const LossOptions& options, A* loss, A* statistics) {
  std::vector<double> kept(loss == nullptr ? rows : 0);
  parallel_rows(rows, 512, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bool ignored = target[row] == options.ignore_index;
      const double value = ignored ? 0.0 : sums[row].loss(options, classes);
      statistics[2 * row] = ignored ? A(0) : static_cast<A>(sums[row].largest);
      statistics[2 * row + 1] = ignored ? A(0) : static_cast<A>(1 + sums[row].others());
      if (loss == nullptr)
        kept[row] = value;
      else
        loss[row] = static_cast<A>(value);
    }
  });
  return std::accumulate(kept.begin(), kept.end(), 0.0);
}

inline at::Tensor number(double value, at::ScalarType type) {
  auto result = at::empty({}, at::TensorOptions(type));
  switch_dtype(dtype_of(type), [&](auto t) {
    using T = decltype(t);
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    *result.mutable_data_ptr<T>() = static_cast<T>(static_cast<Wide>(value));
  });
  return result;
}

enum class Reduction { none, sum, mean };

inline Reduction reduction_of(std::string_view name) {
  return name == "none" ? Reduction::none : name == "sum" ? Reduction::sum : Reduction::mean;
}

// The loss in dtype `type`: [rows], their sum, or that divided by `count`. Each step is rounded as
// torch operations would; `statistics` [rows, 2] is written.
inline at::Tensor finish_loss(const RowSums* sums, const at::Tensor& target, int64_t classes,
                              int64_t count, const LossOptions& options, Reduction reduction,
                              at::ScalarType type, const at::Tensor& statistics) {
  return with_statistics(statistics, [&]<typename A>(A* statistics_data) {
    const auto rows = reduction == Reduction::none ? at::empty(target.sizes(), statistics.options())
                                                   : at::Tensor();
    auto total = static_cast<A>(
        finish_rows(sums, target.const_data_ptr<int64_t>(), target.numel(), classes, options,
                    rows.defined() ? rows.mutable_data_ptr<A>() : nullptr, statistics_data));
    if (rows.defined()) return rows.to(type);
    if (reduction == Reduction::mean) total /= static_cast<A>(count);
    return number(total, type);
  });
}

// The numbers of the gradient of each row, from `grad_loss` ([rows] or one number) and statistics.
inline std::vector<RowGradient> row_gradients(const at::Tensor& grad_loss,
                                              const at::Tensor& statistics,
                                              const LossOptions& options, int64_t classes) {
  // In double, which both dtypes fit: three numbers per row.
  const auto grads = grad_loss.to(at::kDouble).contiguous();
  const auto wide = statistics.to(at::kDouble).contiguous();
  const double* grad = grads.const_data_ptr<double>();
  const double* of_rows = wide.const_data_ptr<double>();
  const int64_t rows = wide.numel() / 2, stride = grads.numel() == 1 ? 0 : 1;
  std::vector<RowGradient> gradients;
  gradients.reserve(rows);
  for (int64_t row = 0; row < rows; ++row) {
    gradients.emplace_back(grad[row * stride], of_rows[2 * row], of_rows[2 * row + 1], options,
                           classes);
  }
  return gradients;
}

inline LossOptions token_options(int64_t ignore_index, double temperature, double softcap) {
  return {ignore_index, 0, 0, softcap, 1 / temperature, true};
}

// Of token_logprobs, from the sums of each row, 0 where ignored: log-probability, entropy and
// log-sum-exp in `tokens` [3, rows]; the largest y, the sum of the exponentials relative to it, the
// mean of y - largest, and whether the target is the largest, in `statistics` [rows, 4].
inline void finish_tokens(const RowSums* sums, const at::Tensor& target, const LossOptions& options,
                          const at::Tensor& tokens, const at::Tensor& statistics) {
  const auto* targets = target.const_data_ptr<int64_t>();
  const int64_t rows = target.numel();
  with_statistics(tokens, [&]<typename A>(A* values) {
    A* of_rows = statistics.mutable_data_ptr<A>();
    for (int64_t row = 0; row < rows; ++row) {
      const RowSums& s = sums[row];
      const bool counts = targets[row] != options.ignore_index;
      const double others = s.others(), spread = std::log1p(others), mean = s.mean();
      const bool hit = targets[row] >= 0 && s.label >= s.largest && !std::isnan(others);
      const double numbers[] = {-s.loss(options, 1), spread - mean, s.largest + spread};
      const double kept[] = {s.largest, 1 + others, mean, hit ? 1.0 : 0.0};
      for (int i = 0; i < 3; ++i) values[i * rows + row] = static_cast<A>(counts ? numbers[i] : 0);
      for (int i = 0; i < 4; ++i) of_rows[4 * row + i] = static_cast<A>(counts ? kept[i] : 0);
    }
  });
}

// The numbers of the gradient of each row, from those of `tokens` [3, rows] and statistics.
inline std::vector<RowGradient> token_gradients(const at::Tensor& grad_tokens,
                                                const at::Tensor& statistics,
                                                const LossOptions& options) {
  const auto grads = grad_tokens.to(at::kDouble).contiguous();
  const auto wide = statistics.to(at::kDouble).contiguous();
  const double* grad = grads.const_data_ptr<double>();
  const double* kept = wide.const_data_ptr<double>();
  const int64_t rows = wide.numel() / 4;
  std::vector<RowGradient> gradients;
  gradients.reserve(rows);
  for (int64_t row = 0; row < rows; ++row, kept += 4) {
    gradients.emplace_back(grad[row], grad[rows + row], grad[2 * rows + row], kept[0], kept[1],
                           kept[2], options);
  }
  return gradients;
}

}  // namespace fusedops
