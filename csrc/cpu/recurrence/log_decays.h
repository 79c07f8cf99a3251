// Sums of logarithms of decays over the tokens of a chunk, whose differences keep their bits.
//
// After a strong decay the sums are large while those of later tokens differ little. Each sum is
// therefore a number and what its rounding lost. Include from *.isa.cpp only.
#pragma once

#include "../common/exp2_vec.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// The exponential of a smaller number is 0 as well.
template <typename A>
constexpr double kLeastLog = sizeof(A) == sizeof(double) ? -750 : -110;

template <typename A>
struct LogSum {
  double total = 0;

  // Adds a logarithm, of which minus infinity counts as a decay of 0.
  void add(A log) { total += log < A(kLeastLog<A>) ? kLeastLog<A> : log; }
  A high() const { return static_cast<A>(total); }
  A low() const { return static_cast<A>(total - high()); }

  // exp(this sum - others), for a vector of others.
  Vec<A> decay_since(const A* high_parts, const A* low_parts) const {
    using V = Vec<A>;
    return exp_unbiased((V(high()) - V::loadu(high_parts)) + (V(low()) - V::loadu(low_parts)));
  }
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
