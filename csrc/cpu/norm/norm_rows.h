// What the norms do to a row: its statistics, its normalisation, its gradient. Include from
// *.isa.cpp only.
//
// Centred statistics take one pass: sums of the distances from a pivot, the mean of the row's
// beginning, and of their squares. Where the pivot turns out to be farther from the mean than the
// deviation, the squares would lose digits, and the row is read again in two passes: mean, then
// centred sums. Either way a mean of 1e4 with deviation 1 stays right. The mean square is summed in
// the order in which torch sums a contiguous row, so that RMS norms are torch's bits.
//
// Backward, with xhat = (x - mean) * rstd and h = dy * weight:
//   dx      = rstd * (h - mean(h) - xhat * mean(h * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// where mean and mean(h) are missing when rows are not centred.
//
// The forward reads a row twice: for its sums, and to write it. While a row is written the next one
// is read (`interleaved`, which is called at each vector, writes): memory is then read and written
// at an even pace, and a row's sums are not waited for. On two Zen 4 cores that took layer_norm of
// bfloat16 from 1.08 to 0.92 ms for 2048 x 4096, from 73 to 62 us for 1024 x 768. With a residual,
// and in the backward, there are so many streams that it cost 10 % instead.
//
// Parameters that are absent are rows of the value that changes nothing: one form of each loop
// serves all, which halves the code and cost nothing that was measured.
#pragma once

#include <algorithm>
#include <cmath>

#include "../common/scratch.h"
#include "../common/vec.h"
#include "norm.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
struct Moments {
  A mean;        // what is taken from the row first: its mean as rounded, or the pivot
  A correction;  // true mean - that
  A rstd;
};

// For `interleaved` where there is no other row.
struct Nothing {
  inline void operator()(auto...) const {}
};

// Columns after which the sums of a centred row are put aside: a sum of a million elements in one
// vector would have lost two digits more than torch's (rows of 150528 elements, one image, half a
// digit).
constexpr int64_t kPieceColumns = 16384;

// How many elements at the beginning of a row give its pivot.
template <typename T>
constexpr int64_t kPivotColumns = 4 * Vec<T>::size();

// The sums over a row of x - pivot and of its square.
template <typename T>
struct PivotSums {
  using A = Acc<T>;
  using V = Vec<T>;
  static constexpr int W = V::size();

  // The pivot is the mean of the first elements: near the mean of the row, as a rule.
  PivotSums(const T* x, int64_t columns) : pivot(static_cast<A>(x[0])) {
    if (columns < kPivotColumns<T>) return;
    const V sum = (load_vec(x) + load_vec(x + W)) + (load_vec(x + 2 * W) + load_vec(x + 3 * W));
    pivot = sum_lanes(sum) / static_cast<A>(kPivotColumns<T>);
  }

  // A vector of the row; what fills none is left to pivoted_moments.
  inline __attribute__((always_inline)) void add(const V& x) {
    const V distance = x - V(pivot);
    distances = distances + distance;
    squares = at::vec::fmadd(distance, distance, squares);
  }

  A pivot;
  V distances = V(A(0)), squares = V(A(0));
};

template <typename T, typename Interleaved>
inline __attribute__((always_inline)) PivotSums<T> sum_from_pivot(const T* x, int64_t columns,
                                                                  const Interleaved& interleaved) {
  using A = Acc<T>;
  using V = Vec<T>;
  PivotSums<T> sums(x, columns);
  V distances = V(A(0)), squares = V(A(0));  // of the pieces before
  const T* next = x + prefetch_distance<T>(columns);
  for (int64_t first = 0; first < columns; first += kPieceColumns) {
    const int64_t size = std::min(kPieceColumns, columns - first);
    for_each_vector<Vec<T>::size()>(size, [&](int64_t i, int64_t count, auto full) {
      const int64_t c = first + i;
      __builtin_prefetch(next + c, 0, 2);
      if constexpr (full) sums.add(load_vec(x + c));
      interleaved(c, count, full);
    });
    if (columns <= kPieceColumns) return sums;
    distances = distances + sums.distances;
    squares = squares + sums.squares;
    sums.distances = sums.squares = V(A(0));
  }
  sums.distances = distances;
  sums.squares = squares;
  return sums;
}

// Statistics in two passes. Four accumulators hide the latency.
template <typename T>
inline __attribute__((noinline)) Moments<Acc<T>> two_pass_moments(const T* x, int64_t columns,
                                                                  Acc<T> eps) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t blocked = columns - columns % (4 * W);
  A total(0), deviation(0), squares(0);
  const auto pieces = [&](const auto& add) {
    for (int64_t first = 0; first < blocked; first += kPieceColumns) {
      add(first, std::min(first + kPieceColumns, blocked));
    }
  };
  pieces([&](int64_t from, int64_t to) {
    V sum[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
    for (int64_t c = from; c < to; c += 4 * W) {
      for (int k = 0; k < 4; ++k) sum[k] = sum[k] + load_vec(x + c + k * W);
    }
    total += sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  });
  for (int64_t c = blocked; c < columns; ++c) total += static_cast<A>(x[c]);

  const A mean = total / static_cast<A>(columns);
  pieces([&](int64_t from, int64_t to) {
    V sum[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
    V sum_of_squares[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
    for (int64_t c = from; c < to; c += 4 * W) {
      for (int k = 0; k < 4; ++k) {
        const V centred = load_vec(x + c + k * W) - V(mean);
        sum[k] = sum[k] + centred;
        sum_of_squares[k] = at::vec::fmadd(centred, centred, sum_of_squares[k]);
      }
    }
    deviation += sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    squares += sum_lanes((sum_of_squares[0] + sum_of_squares[1]) +
                         (sum_of_squares[2] + sum_of_squares[3]));
  });
  for (int64_t c = blocked; c < columns; ++c) {
    const A centred = static_cast<A>(x[c]) - mean;
    deviation += centred;
    squares += centred * centred;
  }
  const A correction = deviation / static_cast<A>(columns);
  const A variance = squares / static_cast<A>(columns) - correction * correction;
  // Rounding may leave a variance just below zero; NaN must stay NaN.
  return {mean, correction, A(1) / std::sqrt((variance < A(0) ? A(0) : variance) + eps)};
}

// The statistics of a row from its sums, or in two passes when the pivot was too far from the mean.
template <typename T>
inline Moments<Acc<T>> pivoted_moments(const PivotSums<T>& sums, const T* x, int64_t columns,
                                       Acc<T> eps) {
  using A = Acc<T>;
  A distances = sum_lanes(sums.distances), squares = sum_lanes(sums.squares);
  for (int64_t c = columns - columns % Vec<T>::size(); c < columns; ++c) {
    const A distance = static_cast<A>(x[c]) - sums.pivot;
    distances += distance;
    squares += distance * distance;
  }
  const A correction = distances / static_cast<A>(columns);
  const A variance = squares / static_cast<A>(columns) - correction * correction;
  // Written so that NaN does not ask for more.
  if (correction * correction > variance) return two_pass_moments(x, columns, eps);
  return {sums.pivot, correction, A(1) / std::sqrt(variance + eps)};
}

// The vector rounded to T, in the accumulation dtype.
template <typename T>
inline Vec<T> rounded(const Vec<T>& vector) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return vector;
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    return widen<T>(round_to<T>(vector));
#else
    T values[Vec<T>::size()];
    store_vec(values, vector);
    return load_vec(values);
#endif
  }
}

// A parameter in the accumulation dtype, plus `offset`: converted once a task instead of once a
// row. `absent` stands for each element of one that is null.
template <typename A>
class Parameter {
  using V = Vec<A>;

 public:
  Parameter(const void* from, DType dtype, int64_t columns, A offset, A absent) {
    if (from != nullptr && offset == A(0) && !is_half(dtype)) {
      values_ = static_cast<const A*>(from);
      return;
    }
    copy_ = Scratch<A>(columns, absent);
    values_ = copy_.data();
    if (from == nullptr) return;
    switch_beside<A>(dtype, [&](auto parameter) {
      using P = decltype(parameter);
      const V offsets(offset);
      for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        const V value = load_vec(static_cast<const P*>(from) + c, count, full);
        store_vec(copy_.data() + c, value + offsets, count, full);
      });
    });
  }
  const A* get() const { return values_; }

 private:
  Scratch<A> copy_;
  const A* values_;
};

// Products that are rounded: the compiler must not contract them with the addition that follows.
template <typename A>
inline A square(A x) {
  A product = x * x;
#if defined(__x86_64__)
  asm("" : "+x"(product));
#endif
  return product;
}

template <typename A>
inline at::vec::Vectorized<A> rounded_product(const at::vec::Vectorized<A>& x,
                                              const at::vec::Vectorized<A>& y) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<A, float>) {
    __m512 product = x * y;
    asm("" : "+v"(product));
    return product;
  } else {
    __m512d product = x * y;
    asm("" : "+v"(product));
    return product;
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<A, float>) {
    __m256 product = x * y;
    asm("" : "+x"(product));
    return product;
  } else {
    __m256d product = x * y;
    asm("" : "+x"(product));
    return product;
  }
#else
  return x * y;
#endif
}

// The sum of the squares of a row in the order of torch's sum over a contiguous dimension: vectors
// of 32 bytes (torch has no AVX-512 kernel for it), four side by side, in runs that are added in
// four levels; lanes and what is left over at the end.
template <typename T, typename Interleaved>
inline __attribute__((always_inline)) Acc<T> sum_squares(const T* x, int64_t columns,
                                                         const Interleaved& interleaved) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  constexpr int64_t kLanes = 32 / sizeof(A);
  constexpr int64_t kStrip = 4 * kLanes;
  constexpr int N = kStrip / W;
  constexpr int kLevels = 4;
  const int64_t strips = columns / kStrip;
  int64_t bits = 0;  // of the number of strips, rounded up
  while ((int64_t{1} << bits) < strips) ++bits;
  const int64_t power = std::max<int64_t>(4, bits / kLevels);
  const int64_t run = int64_t{1} << power;

  V level[kLevels][N];
  for (auto& sums : level) std::fill(sums, sums + N, V(A(0)));
  const auto add_strip = [&](int64_t strip) {
    for (int n = 0; n < N; ++n) {
      const int64_t c = strip * kStrip + n * W;
      const V values = load_vec(x + c);
      level[0][n] = level[0][n] + rounded_product(values, values);
      __builtin_prefetch(x + prefetch_distance<T>(columns) + c, 0, 2);
      interleaved(c, int64_t{W}, std::true_type());
    }
  };
  int64_t strip = 0;
  while (strip + run <= strips) {
    for (int64_t j = 0; j < run; ++j) add_strip(strip++);
    for (int j = 1; j < kLevels; ++j) {
      for (int n = 0; n < N; ++n) {
        level[j][n] = level[j][n] + level[j - 1][n];
        level[j - 1][n] = V(A(0));
      }
      if (strip & ((run - 1) << (j * power))) break;
    }
  }
  for (; strip < strips; ++strip) add_strip(strip);
  alignas(64) A part[kStrip];
  for (int n = 0; n < N; ++n) {
    for (int j = 1; j < kLevels; ++j) level[0][n] = level[0][n] + level[j][n];
    level[0][n].store(part + n * W);
  }

  const int64_t left = strips * kStrip;
  // Rows shorter than a vector are summed element by element, else alike.
  const int64_t lanes = columns < kLanes ? 1 : kLanes;
  const int64_t whole = columns < kLanes ? columns / 4 * 4 : left;
  const int64_t end = columns - columns % lanes;
  for_each_vector<W>(columns - left, [&](int64_t c, int64_t count, auto full) {
    interleaved(left + c, count, full);
  });
  for (int64_t c = left; c < whole; ++c) part[c] = square(static_cast<A>(x[c]));
  for (int64_t c = whole; c < end; ++c) {
    part[(c - whole) % lanes] += square(static_cast<A>(x[c]));
  }
  for (int64_t k = 1; k < 4; ++k) {
    for (int64_t lane = 0; lane < lanes; ++lane) part[lane] += part[k * lanes + lane];
  }
  A total = A(0);
  for (int64_t c = end; c < columns; ++c) total += square(static_cast<A>(x[c]));
  for (int64_t lane = 0; lane < lanes; ++lane) total += part[lane];
  return total;
}

template <typename A>
inline Moments<A> mean_square_moments(A squares, int64_t columns, A eps) {
  return {A(0), A(0), A(1) / std::sqrt(squares / static_cast<A>(columns) + eps)};
}

template <typename A>
struct RowParameters {
  explicit RowParameters(const NormForward& a)
      : weight(a.weight, a.parameter_dtype, a.columns, A(a.weight_offset), A(1)),
        bias(a.bias, a.parameter_dtype, a.columns, A(0), A(-0.0)) {}
  Parameter<A> weight, bias;
};

// Writes rows of the output: y = (x - mean - correction) * rstd * weight + bias; without the three
// that are added when rows are not centred, and then, when `round_before_weight`, with x * rstd
// rounded to T. x is in memory as S: T, or the wider accumulation dtype.
template <typename T, typename S, typename O, bool kCentred>
class RowWriter {
 public:
  using A = Acc<T>;
  using V = Vec<T>;

  RowWriter(const NormForward& a, bool stream, const RowParameters<A>& parameters)
      : a_(a),
        weight_(parameters.weight.get()),
        bias_(parameters.bias.get()),
        stream_(stream),
        round_(!std::is_same_v<T, A> && a.round_before_weight),
        ahead_(prefetch_distance<T>(a.columns)) {}

  // Writes the statistics of a row, whose elements are written next.
  void start(int64_t row, const S* x, const Moments<A>& m) {
    if constexpr (kCentred) static_cast<A*>(a_.mean)[row] = m.mean + m.correction;
    static_cast<A*>(a_.rstd)[row] = m.rstd;
    x_ = x;
    y_ = static_cast<O*>(a_.output) + row * a_.columns;
    mean_ = V(m.mean);
    rstd_ = V(m.rstd);
    shift_ = V(-m.correction * m.rstd);
  }

  template <typename Full>
  inline __attribute__((always_inline)) void operator()(int64_t c, int64_t count, Full full) const {
    if (x_ == nullptr) return;  // before the first row
    if (!stream_) __builtin_prefetch(y_ + ahead_ + c, 1, 3);
    const V x = load_vec(x_ + c, count, full), weight = load_vec(weight_ + c, count, full);
    V y;
    if constexpr (kCentred) {
      const V bias = load_vec(bias_ + c, count, full);
      y = at::vec::fmadd(at::vec::fmadd(x - mean_, rstd_, shift_), weight, bias);
    } else {
      y = (round_ ? rounded<T>(x * rstd_) : x * rstd_) * weight;
    }
    store_or_stream(stream_, y_ + c, y, count, full);
  }

 private:
  const NormForward& a_;
  const A* weight_;
  const A* bias_;
  bool stream_;
  bool round_;
  int64_t ahead_;
  const S* x_ = nullptr;
  O* y_ = nullptr;
  V mean_, rstd_, shift_;
};

// Rows that the backward takes at once: the sums of the parameter gradients are then read and
// written once for all of them (each row is still added in its turn). With AVX-512 one was fastest;
// with AVX2 (on Zen 4, 1024x1024) one took 4 to 9 % longer than two.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 1;
#else
constexpr int kRows = 2;
#endif

// What the gradient of a row depends on, besides its elements.
template <typename A>
struct RowGradient {
  A mean;
  A rstd;
  A across;  // mean(h)
  A along;   // -mean(h * xhat) * rstd
};

// R rows: adds their part of the parameter gradients to dweight and dbias and computes what their
// own gradients need.
template <typename T, bool kCentred, int R>
inline void reduce_rows(const NormBackward& a, int64_t row, const Acc<T>* weight, Acc<T>* dweight,
                        Acc<T>* dbias, RowGradient<Acc<T>>* gradients) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t columns = a.columns;
  const T* dy = static_cast<const T*>(a.grad_output) + row * columns;
  const T* x = static_cast<const T*>(a.input) + row * columns;
  V mean[R], rstd[R], sum_h[R], sum_hx[R];
  for (int r = 0; r < R; ++r) {
    mean[r] = V(kCentred ? static_cast<const A*>(a.mean)[row + r] : A(0));
    rstd[r] = V(static_cast<const A*>(a.rstd)[row + r]);
    sum_h[r] = sum_hx[r] = V(A(0));
  }
  for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
    const V w = load_vec(weight + c, count, full);
    V dw = load_vec(dweight + c, count, full);
    V db(A(0));
    if constexpr (kCentred) db = load_vec(dbias + c, count, full);
    for (int r = 0; r < R; ++r) {
      const V grad = load_vec(dy + r * columns + c, count, full);
      V xhat = load_vec(x + r * columns + c, count, full);
      if constexpr (kCentred) xhat = xhat - mean[r];
      xhat = xhat * rstd[r];
      const V h = grad * w;
      sum_hx[r] = at::vec::fmadd(h, xhat, sum_hx[r]);
      dw = at::vec::fmadd(grad, xhat, dw);
      if constexpr (kCentred) {
        sum_h[r] = sum_h[r] + h;
        db = db + grad;
      }
    }
    store_vec(dweight + c, dw, count, full);
    if constexpr (kCentred) store_vec(dbias + c, db, count, full);
  });
  for (int r = 0; r < R; ++r) {
    const A rstd_of_row = static_cast<const A*>(a.rstd)[row + r];
    gradients[r] = {kCentred ? static_cast<const A*>(a.mean)[row + r] : A(0), rstd_of_row,
                    kCentred ? sum_lanes(sum_h[r]) / static_cast<A>(columns) : A(0),
                    -sum_lanes(sum_hx[r]) / static_cast<A>(columns) * rstd_of_row};
  }
}

// Calls write(dx_at), where dx_at(c, count, full) is the vector of a row's dx at a column.
template <typename T, typename Write>
inline __attribute__((always_inline)) void with_row_gradient(const NormBackward& a, int64_t row,
                                                             const RowGradient<Acc<T>>& gradient,
                                                             const Acc<T>* weight,
                                                             const Write& write) {
  using V = Vec<T>;
  const T* dy = static_cast<const T*>(a.grad_output) + row * a.columns;
  const T* x = static_cast<const T*>(a.input) + row * a.columns;
  const int64_t ahead = prefetch_distance<T>(a.columns);
  const V mean(gradient.mean), rstd(gradient.rstd);
  const V across(gradient.across), along(gradient.along);
  write([&](int64_t c, int64_t count, auto full) {
    __builtin_prefetch(dy + ahead + c, 0, 2);
    __builtin_prefetch(x + ahead + c, 0, 2);
    // h - mean(h) first, and h rounded as in the mean: it is exactly 0 where the row is constant.
    const V h =
        rounded_product<Acc<T>>(load_vec(dy + c, count, full), load_vec(weight + c, count, full));
    return at::vec::fmadd(load_vec(x + c, count, full) - mean, along, h - across) * rstd;
  });
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
