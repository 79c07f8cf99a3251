// cross_entropy and token_logprobs on the CPU: the sums of the rows, and the gradient of the
// logits.
//
// Forward: one pass over the logits and nothing written but numbers per row. The exponentials are
// taken relative to `base`, a guess of the row's maximum that only has to be within 2^46: 0 at
// first, so that an ordinary row needs no maximum before the sum. Where a block of columns proves
// the guess wrong its sum is computed again, from L1, relative to its maximum.
//
// Backward: the logits once, their gradient once, streamed around the cache when it is large.
//
// Blocks are fixed columns of the row: its bits depend on nothing else.
#include "cross_entropy.h"

#include <algorithm>
#include <limits>

#include "../../common/parallel.h"
#include "cross_entropy_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kBlock = 2048;  // columns between two looks at the maximum: 8 KiB in L1
constexpr double kRange = 32;     // a sum of 2^17 exponentials of up to e^32 is far from 2^127
constexpr int kUnroll = 4;

// The larger; of a NaN and a number, either: the sum of the exponentials tells of NaN.
template <typename A>
inline at::vec::Vectorized<A> larger(const at::vec::Vectorized<A>& a,
                                     const at::vec::Vectorized<A>& b) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<A, float>) return _mm512_max_ps(a, b);
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<A, float>) return _mm256_max_ps(a, b);
#endif
  return at::vec::maximum(a, b);
}

template <typename A>
inline double largest_lane(const at::vec::Vectorized<A>& vector) {
  A values[at::vec::Vectorized<A>::size()];
  vector.store(values);
  A largest = values[0];
  for (const A value : values) largest = value > largest ? value : largest;
  return largest;
}

template <typename A>
constexpr A kNone = -std::numeric_limits<A>::infinity();

// exp(shifted), shifted = y - base
template <typename T>
inline Vec<T> term(const Vec<T>& shifted) {
  return exp2_of<T>(shifted * Vec<T>(static_cast<Acc<T>>(kLog2E)));
}

struct BlockSums {
  double exponentials;
  double values;
  double largest;
};

template <typename T, bool kCapped>
inline BlockSums sum_block(const T* x, int64_t columns, double base, double softcap) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const A cap = static_cast<A>(softcap);
  const V reference(static_cast<A>(base));
  V sum[kUnroll], values[kUnroll], largest[kUnroll];
  for (int k = 0; k < kUnroll; ++k) {
    sum[k] = values[k] = V(A(0));
    largest[k] = V(kNone<A>);
  }
  const auto add = [&](int k, const V& y) {
    const V shifted = y - reference;
    largest[k] = larger(largest[k], y);
    values[k] = values[k] + shifted;
    sum[k] = sum[k] + term<T>(shifted);
  };
  int64_t c = 0;
  for (; c + kUnroll * W <= columns; c += kUnroll * W) {
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) {
      add(k, capped<A, kCapped>(load_vec(x + c + k * W), cap));
    }
  }
  for (; c + W <= columns; c += W) add(0, capped<A, kCapped>(load_vec(x + c), cap));
  if (c < columns) {
    const V y = capped<A, kCapped>(load_vec(x + c, columns - c), cap);
    const V before = values[0];
    add(0, V::set(V(kNone<A>), y, columns - c));
    values[0] = V::set(before, values[0], columns - c);
  }
  return {sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])),
          sum_lanes((values[0] + values[1]) + (values[2] + values[3])),
          largest_lane(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])))};
}

template <typename T, bool kCapped>
void sum_row(const T* x, int64_t columns, double softcap, RowSums& s) {
  for (int64_t c = 0; c < columns; c += kBlock) {
    const int64_t count = std::min(kBlock, columns - c);
    BlockSums block = sum_block<T, kCapped>(x + c, count, s.base, softcap);
    const bool settled = s.own > 0;
    const bool wrong =
        block.largest > s.base + kRange ||
        (!settled && block.largest > kNone<double> && block.largest < s.base - kRange);
    if (wrong) {
      if (settled) s.exponentials *= std::exp(s.base - block.largest);
      if (s.columns > 0) s.values += (s.base - block.largest) * s.columns;
      s.base = block.largest;
      block = sum_block<T, kCapped>(x + c, count, s.base, softcap);
    }
    s.exponentials += block.exponentials;
    s.values += block.values;
    s.columns += static_cast<double>(count);
    if (block.largest > s.largest) {
      s.largest = block.largest;
      const auto above = static_cast<Acc<T>>(s.largest) - static_cast<Acc<T>>(s.base);
      s.own = first_lane(term<T>(Vec<T>(above)));
    }
  }
}

// y of one logit. Not inlined: the target's has the bits of the largest one where they are equal.
template <typename A, bool kCapped>
__attribute__((noinline)) A y_of(A x, const LossOptions& o) {
  using V = at::vec::Vectorized<A>;
  const A y = first_lane(capped<A, kCapped>(V(x), static_cast<A>(o.softcap)));
  return o.tokens ? y * static_cast<A>(o.inverse_temperature) : y;
}

// The sums of token_logprobs, relative to the largest y so far. It is looked for first, a block in
// L1 at a time, so that the entropy of a row that is nearly one class keeps its digits.
template <typename T, bool kCapped>
void sum_token_row(const T* x, int64_t columns, const LossOptions& o, RowSums& s) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const A cap = static_cast<A>(o.softcap);
  const V inverse_temperature(static_cast<A>(o.inverse_temperature));
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t size = std::min(kBlock, columns - first);
    V most(kNone<A>);
    for_each_vector<W>(size, [&](int64_t c, int64_t count, auto full) {
      const V in = load_vec(x + first + c, count, full);
      most = larger(most, full ? in : V::set(V(kNone<A>), in, count));
    });
    // Of logits that are all -inf, too: a softcap makes them numbers.
    const double largest = y_of<A, kCapped>(static_cast<A>(largest_lane(most)), o);
    if (largest > s.largest) {
      if (s.own > 0) {
        const double gap = s.largest - largest, share = std::exp(gap);
        s.values = share * (s.values + gap * s.exponentials);
        s.exponentials *= share;
      }
      s.base = s.largest = largest;
      s.own = first_lane(term<A>(V(A(0))));
    }
    V sum(A(0)), values(A(0));
    const V base(static_cast<A>(s.base));
    for_each_vector<W>(size, [&](int64_t c, int64_t count, auto full) {
      const V y = capped<A, kCapped>(load_vec(x + first + c, count, full), cap);
      V shifted = y * inverse_temperature - base;
      if constexpr (!full) shifted = V::set(V(kNone<A>), shifted, count);
      const V exponential = term<A>(shifted);
      sum = sum + exponential;
      values = at::vec::fmadd(exponential, at::vec::clamp_min(shifted, V(A(kVanished))), values);
    });
    s.exponentials += sum_lanes(sum);
    s.values += sum_lanes(values);
  }
}

template <typename T, bool kCapped>
void sums(const CrossEntropySums& a) {
  const double softcap = a.options.softcap;
  parallel_rows(a.rows, 2 * a.columns * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t target = a.target[row];
      if (target == a.options.ignore_index) continue;
      const int64_t from = a.index != nullptr ? a.index[row] : row;
      const T* x = static_cast<const T*>(a.logits) + from * a.row_stride;
      RowSums& s = a.sums[row];
      a.options.tokens ? sum_token_row<T, kCapped>(x, a.columns, a.options, s)
                       : sum_row<T, kCapped>(x, a.columns, softcap, s);
      const int64_t column = target - a.first;
      if (column >= 0 && column < a.columns) {
        s.label = y_of<Acc<T>, kCapped>(static_cast<Acc<T>>(x[column]), a.options);
      }
    }
  });
}

template <typename T, bool kCapped, bool kTokens>
void backward(const CrossEntropyBackward& a) {
  using A = Acc<T>;
  using V = Vec<T>;
  const int64_t columns = a.columns;
  const bool stream = a.rows * columns * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
  parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.logits) + row * columns;
      T* dx = static_cast<T*>(a.grad_logits) + row * columns;
      const int64_t target = a.target[row];
      if (target == a.options.ignore_index) {
        for_each_aligned_vector<V::size()>(dx, columns, [&](int64_t c, int64_t count, auto full) {
          store_or_stream(stream, dx + c, V(A(0)), count, full);
        });
        continue;
      }
      const GradientOfRow<T, kCapped, kTokens> gradient(a.gradient[row], a.options);
      for_each_aligned_vector<V::size()>(dx, columns, [&](int64_t c, int64_t count, auto full) {
        store_or_stream(stream, dx + c, gradient.at(load_vec(x + c, count, full)), count, full);
      });
      dx[target] = static_cast<T>(gradient.at_target(static_cast<A>(x[target])));
    }
  });
}

}  // namespace

void cross_entropy_sums(const CrossEntropySums& a) {
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    return a.options.softcap > 0 ? sums<T, true>(a) : sums<T, false>(a);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& a) {
  switch_dtype(a.dtype, [&](auto t) {
    with_form(a.options,
              [&](auto capped, auto tokens) { backward<decltype(t), capped, tokens>(a); });
  });
}

}  // namespace fusedops::CPU_CAPABILITY
