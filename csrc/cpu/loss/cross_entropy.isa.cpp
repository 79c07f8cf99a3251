// cross_entropy on the CPU: the sums of the rows, and the gradient of the logits.
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
      sum_row<T, kCapped>(x, a.columns, softcap, s);
      const int64_t column = target - a.first;
      if (column >= 0 && column < a.columns) {
        const Vec<T> label(static_cast<Acc<T>>(x[column]));
        s.label = first_lane(capped<Acc<T>, kCapped>(label, static_cast<Acc<T>>(softcap)));
      }
    }
  });
}

template <typename T, bool kCapped>
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
      const A grad = static_cast<const A*>(a.grad_loss)[row * a.grad_loss_stride];
      const A* statistics = static_cast<const A*>(a.statistics) + 2 * row;
      const RowGradient numbers(grad, statistics[0], statistics[1], a.options, columns);
      const GradientOfRow<T, kCapped> gradient(numbers, a.options.softcap);
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
    using T = decltype(t);
    return a.options.softcap > 0 ? backward<T, true>(a) : backward<T, false>(a);
  });
}

}  // namespace fusedops::CPU_CAPABILITY
