// One token per lane: the vectors of moe_route, the order of its keys, and the list of the best.
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../common/exp2_vec.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Scratch rows end with full vectors of any type.
constexpr int64_t kPadding = 16;

inline int64_t padded(int64_t count) {
  return (count + kPadding - 1) / kPadding * kPadding;
}

template <typename A>
using IntegerOf = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;

// Tokens of a block.
template <typename A>
constexpr int64_t kLanes = 64 / sizeof(A);

// A vector of one element per token. (The compiler's own vectors: these compare and select on every
// instruction set without a horizontal step or a mask in memory.)
template <typename E>
struct LanesOf {
  typedef E type __attribute__((vector_size(64)));
};
template <typename E>
using Lanes = typename LanesOf<E>::type;

template <typename E>
inline Lanes<E> load(const E* from) {
  Lanes<E> lanes;
  std::memcpy(&lanes, from, 64);
  return lanes;
}

template <typename E>
inline void store(E* to, const Lanes<E>& lanes) {
  std::memcpy(to, &lanes, 64);
}

template <typename E>
inline Lanes<E> all(E value) {
  return Lanes<E>{} + value;
}

template <typename A>
inline constexpr A kInfinity = std::numeric_limits<A>::infinity();

// An integer that orders as the value does, and back; NaN is -inf, -0 is 0. The least integer
// stands for no value: it is below that of -inf.
template <typename A>
inline constexpr auto kNothing = std::numeric_limits<IntegerOf<A>>::min();

template <typename I>
inline Lanes<I> reorder(const Lanes<I>& bits) {
  return bits ^ ((bits >> (8 * sizeof(I) - 1)) & std::numeric_limits<I>::max());
}

template <typename A>
inline Lanes<IntegerOf<A>> keys_of(const Lanes<A>& values) {
  const Lanes<A> legal = (values == values ? values : all(-kInfinity<A>)) + A(0);
  Lanes<IntegerOf<A>> bits;
  std::memcpy(&bits, &legal, 64);
  return reorder<IntegerOf<A>>(bits);
}

template <typename A>
inline Lanes<A> values_of(const Lanes<IntegerOf<A>>& keys) {
  const Lanes<IntegerOf<A>> bits = reorder<IntegerOf<A>>(keys);
  Lanes<A> values;
  std::memcpy(&values, &bits, 64);
  return values;
}

// The factor that a random word puts on a logit, in [1 - jitter, 1 + jitter).
template <typename A>
inline A jitter_factor(uint32_t word, double jitter) {
  return A(1) + static_cast<A>(jitter) * (static_cast<A>(word >> 8) * A(0x1p-23) - A(1));
}

template <typename A>
inline Lanes<A> exp_of(const Lanes<A>& x) {
  using V = at::vec::Vectorized<A>;
  A values[kLanes<A>];
  store(values, x);
  for (int64_t i = 0; i < kLanes<A>; i += V::size()) {
    exp_of<A>(V::loadu(values + i)).store(values + i);
  }
  return load(values);
}

// `count` rows of logits of one element per token become their sigmoids, with `normalize` divided
// by their sum down the rows (a column of -inf gives 0); sigmoid(-x) goes to `falling` unless it is
// null. To be divided they are relative to exp(largest x) where a column is negative: they do not
// underflow.
template <typename A>
inline void column_sigmoid(A* x, int64_t count, bool normalize, A* falling = nullptr) {
  constexpr int64_t L = kLanes<A>;
  Lanes<A> peak{}, scale = all(A(1)), sum{};
  if (normalize) {
    peak = all(std::numeric_limits<A>::lowest());
    for (int64_t c = 0; c < count; ++c) {
      const Lanes<A> value = load(x + c * L);
      peak = value > peak ? value : peak;
    }
    peak = peak < A(0) ? peak : all(A(0));
    scale = peak < A(0) ? exp_of<A>(peak) : scale;
  }
  for (int64_t c = 0; c < count; ++c) {
    const Lanes<A> value = load(x + c * L);
    const Lanes<A> e = exp_of<A>((value < A(0) ? value : -value) - peak);
    const Lanes<A> t = e * scale, large = A(1) / (A(1) + t);
    const Lanes<A> rising = value < A(0) ? e * large : large;
    store<A>(x + c * L, rising);
    if (falling != nullptr) store<A>(falling + c * L, value < A(0) ? large : t * large);
    sum += rising;
  }
  sum = sum == A(0) ? all(A(1)) : sum;
  for (int64_t c = 0; c < count && normalize; ++c) store<A>(x + c * L, load(x + c * L) / sum);
}

// Softmax down `count` rows of one element per token; a column of -inf gives 0.
template <typename A>
class ColumnSoftmax {
 public:
  static constexpr int64_t L = kLanes<A>;

  ColumnSoftmax(const A* x, int64_t count) : peak_(all(std::numeric_limits<A>::lowest())) {
    for (int64_t c = 0; c < count; ++c) {
      const Lanes<A> value = load(x + c * L);
      peak_ = value > peak_ ? value : peak_;
    }
    Lanes<A> sum{};
    for (int64_t c = 0; c < count; ++c) sum += exp_of<A>(load(x + c * L) - peak_);
    inverse_ = sum == A(0) ? sum : A(1) / sum;
  }

  // The probabilities of `count` rows of x; both may be one.
  void apply(const A* x, A* to, int64_t count) const {
    for (int64_t c = 0; c < count; ++c) {
      store<A>(to + c * L, exp_of<A>(load(x + c * L) - peak_) * inverse_);
    }
  }

 private:
  Lanes<A> peak_;
  Lanes<A> inverse_;
};

// Keeps the best `places` of `count` rows of keys, best first, with their row numbers. What a key
// passes moves down one place, from the last to the first.
template <typename I>
inline void insert_all(const I* keys, int64_t count, int64_t places, I* best, I* ids) {
  constexpr int64_t L = 64 / sizeof(I);
  std::fill(best, best + places * L, std::numeric_limits<I>::min());
  for (int64_t c = 0; c < count; ++c) {
    const Lanes<I> key = load(keys + c * L), id = all(static_cast<I>(c));
    const int64_t last = std::min(places - 1, c);
    Lanes<I> here = load(best + last * L), here_id = load(ids + last * L);
    auto passes = key > here;
    for (int64_t j = last; j > 0; --j) {
      const Lanes<I> above = load(best + (j - 1) * L), above_id = load(ids + (j - 1) * L);
      const auto passes_above = key > above;
      store<I>(best + j * L, passes ? (passes_above ? above : key) : here);
      store<I>(ids + j * L, passes ? (passes_above ? above_id : id) : here_id);
      here = above;
      here_id = above_id;
      passes = passes_above;
    }
    store<I>(best, passes ? key : here);
    store<I>(ids, passes ? id : here_id);
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
