// Kernels of cross_entropy and token_logprobs, and what the two with a linear layer share with
// them. Formulae are in fusedops/ops/_cross_entropy_math.py.
//
// `rows` are tokens, `columns` classes. A row may come in pieces, `first` being the class of column
// 0: its sums are carried from piece to piece in a RowSums.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops {

struct LossOptions {
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  double softcap;  // 0: none
  double inverse_temperature = 1;
  bool tokens = false;  // of token_logprobs: only then there is a temperature
};

// What is known of a row so far: sum_j exp(y_j - base), sum_j (y_j - base), and y of the target.
// For token_logprobs the second is sum_j exp(y_j - base) (y_j - base), and base is the largest y.
//
// The term of the largest y is kept apart from the sum, rounded in the same way: what the others
// add to it is then right also where it is next to nothing, and a loss is never below zero.
struct RowSums {
  double base = 0;
  double exponentials = 0;
  double values = 0;
  double columns = 0;  // that were summed
  double largest = -std::numeric_limits<double>::infinity();
  double own = 0;  // the term of `largest`; 0 while there is no finite y
  double label = std::numeric_limits<double>::infinity();  // while the target was not met

  // What the others add to the term of the largest; NaN for a row of infinities.
  double others() const {
    const double others = exponentials - own;
    return (others < 0 ? 0 : others) / own;
  }

  // The mean of y - largest by the probabilities; of token_logprobs.
  double mean() const { return values / own / (1 + others()); }

  // Of y - largest, but for the z-loss: the loss of y where the target is among the columns.
  double loss(const LossOptions& o, int64_t classes) const {
    const double log_others = std::log1p(others());
    double loss = log_others;
    if (label <= largest) loss += (1 - o.label_smoothing) * (largest - label);
    // Kept apart: without smoothing a class of logit -inf costs nothing.
    if (o.label_smoothing > 0) {
      const double sum = values + (base - largest) * columns;
      loss -= o.label_smoothing * sum / static_cast<double>(classes);
    }
    if (o.z_loss > 0) loss += o.z_loss * (largest + log_others) * (largest + log_others);
    return loss;
  }
};

// The numbers of a row's gradient: dy_j = exp(y_j - largest) * scale + shift, plus `label` at the
// target. For token_logprobs the factor of the exponential is scale + tilt * (y_j - largest). `sum`
// is that of the exponentials: a logarithm of it added to `largest` would be rounded to the digits
// of `largest`.
struct RowGradient {
  double largest;
  double scale;
  double shift;
  double label;
  double tilt = 0;

  RowGradient(double grad, double largest, double sum, const LossOptions& o, int64_t classes)
      : largest(largest),
        scale(grad / sum),
        shift(o.label_smoothing > 0 ? -grad * o.label_smoothing / static_cast<double>(classes) : 0),
        label(-grad * (1 - o.label_smoothing)) {
    if (o.z_loss > 0) scale *= 1 + 2 * o.z_loss * (largest + std::log(sum));
  }

  // Of token_logprobs: from the gradients of log-probability, entropy and log-sum-exp.
  RowGradient(double logprob, double entropy, double lse, double largest, double sum, double mean,
              const LossOptions& o)
      : largest(largest),
        scale((lse - logprob + entropy * mean) * o.inverse_temperature / sum),
        shift(0),
        label(logprob * o.inverse_temperature),
        tilt(-entropy * o.inverse_temperature / sum) {}
};

// Adds `columns` classes of each row that is not ignored to its sums.
struct CrossEntropySums {
  const void* logits;  // [rows, columns]
  int64_t row_stride;
  const int64_t* index;   // [rows], the row of logits of each row, or null: in order
  const int64_t* target;  // [rows]
  RowSums* sums;          // [rows]
  int64_t rows;
  int64_t columns;
  int64_t first;
  LossOptions options;
  DType dtype;
};

struct CrossEntropyBackward {
  const void* logits;           // [rows, columns]
  const int64_t* target;        // [rows]
  const RowGradient* gradient;  // [rows]
  void* grad_logits;            // [rows, columns]
  int64_t rows;
  int64_t columns;
  LossOptions options;
  DType dtype;
};

}  // namespace fusedops

FUSEDOPS_DECLARE_ISA(cross_entropy_sums, const CrossEntropySums&)
FUSEDOPS_DECLARE_ISA(cross_entropy_backward, const CrossEntropyBackward&)
