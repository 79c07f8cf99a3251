// What the bindings of cross_entropy and linear_cross_entropy share: looking through the targets,
// and the loss of rows whose sums are known.
#pragma once

#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../common/binding.h"
#include "../common/parallel.h"
#include "cross_entropy.h"

namespace fusedops {

// How many targets are not ignored; throws for one that is no class.
inline int64_t count_targets(const char* op, const int64_t* target, int64_t rows, int64_t classes,
                             int64_t ignore_index) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (target[row] == ignore_index) continue;
    TORCH_CHECK_VALUE(target[row] >= 0 && target[row] < classes, op, ": target must be in [0, ",
                      classes, ") or ignore_index ", ignore_index, ", got ", target[row],
                      " at row ", row);
    ++count;
  }
  return count;
}

// Loss and log-sum-exp of each row from its sums, 0 where ignored, and the sum of the losses:
// `loss` is [rows], or one number. Losses are added in order, in double.
template <typename A>
inline void finish_rows(const RowSums* sums, const int64_t* target, int64_t rows, int64_t classes,
                        const LossOptions& options, bool sum, A* loss, A* lse) {
  std::vector<double> kept(sum ? rows : 0);
  parallel_rows(rows, 512, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bool ignored = target[row] == options.ignore_index;
      const double value = ignored ? 0.0 : sums[row].loss(options, classes);
      lse[row] = ignored ? A(0) : static_cast<A>(sums[row].log_sum());
      if (sum)
        kept[row] = value;
      else
        loss[row] = static_cast<A>(value);
    }
  });
  if (!sum) return;
  double total = 0;
  for (const double value : kept) total += value;
  *loss = static_cast<A>(total);
}

inline void finish_rows(const RowSums* sums, const at::Tensor& target, int64_t classes,
                        const LossOptions& options, bool sum, const at::Tensor& loss,
                        const at::Tensor& lse) {
  const auto* targets = target.const_data_ptr<int64_t>();
  if (lse.scalar_type() == at::kDouble) {
    finish_rows(sums, targets, lse.numel(), classes, options, sum, loss.mutable_data_ptr<double>(),
                lse.mutable_data_ptr<double>());
  } else {
    finish_rows(sums, targets, lse.numel(), classes, options, sum, loss.mutable_data_ptr<float>(),
                lse.mutable_data_ptr<float>());
  }
}

inline bool is_sum(std::string_view reduction) {
  TORCH_CHECK_VALUE(reduction == "sum" || reduction == "none",
                    "reduction must be 'sum' or 'none', got ", std::string(reduction));
  return reduction == "sum";
}

}  // namespace fusedops
