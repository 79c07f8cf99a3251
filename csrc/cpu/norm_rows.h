// What the norms do to a row: its statistics, its normalisation, its gradient. Include from
// *.isa.cpp only.
//
// A row of half precision stands widened in a scratch row that stays in L1. Centred statistics take
// one pass: sums of the distances from a pivot, the mean of the row's beginning, and of their
// squares. Where the pivot turns out to be farther from the mean than the deviation, the squares
// would lose digits, and the row is read again in two passes: mean, then centred sums. Either way a
// mean of 1e4 with deviation 1 stays right. The mean square is summed in the order in which torch
// sums a contiguous row, so that RMS norms are torch's bits.
//
// Backward, with xhat = (x - mean) * rstd and h = dy * weight:
//   dx      = rstd * (h - mean(h) - xhat * mean(h * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// where mean and mean(h) are missing when rows are not centred.
//
// Parameters that are absent are rows of the value that changes nothing: one form of each loop
// serves all, which halves the code and cost nothing that was measured.
#pragma once

#include <algorithm>
#include <cmath>

#include "norm.h"
#include "scratch.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
struct Moments {
  A mean;        // what the centred row lacks: rounded mean, or pivot
  A correction;  // true mean - that
  A rstd;
};

// Sums over the whole vectors of a row of x - pivot and of its square; those of even and of odd
// number apart, which hides the latency.
template <typename A>
struct PivotSums {
  using V = at::vec::Vectorized<A>;
  A pivot = A(0);
  V distances[2] = {V(A(0)), V(A(0))};
  V squares[2] = {V(A(0)), V(A(0))};

  inline __attribute__((always_inline)) void add(bool odd, const V& distance) {
    if (odd) {
      distances[1] = distances[1] + distance;
      squares[1] = at::vec::fmadd(distance, distance, squares[1]);
    } else {
      distances[0] = distances[0] + distance;
      squares[0] = at::vec::fmadd(distance, distance, squares[0]);
    }
  }
};

// How many elements at the beginning of a row give its pivot.
template <typename T>
constexpr int64_t kPivotColumns = 4 * Vec<T>::size();

// The mean of the first elements: near the mean of the row, as a rule.
template <typename T>
inline Acc<T> pivot_of(const T* x, int64_t columns) {
  constexpr int W = Vec<T>::size();
  if (columns < kPivotColumns<T>) return static_cast<Acc<T>>(x[0]);
  const Vec<T> sum = (load_vec(x) + load_vec(x + W)) + (load_vec(x + 2 * W) + load_vec(x + 3 * W));
  return sum_lanes(sum) / static_cast<Acc<T>>(kPivotColumns<T>);
}

// Statistics from the sums of a row; `centred_row` is x - pivot. False when
// the pivot is too far from the mean.
template <typename A>
inline bool pivoted_moments(const PivotSums<A>& sums, const A* centred_row, int64_t columns, A eps,
                            Moments<A>& moments) {
  A distances = sum_lanes(sums.distances[0] + sums.distances[1]);
  A squares = sum_lanes(sums.squares[0] + sums.squares[1]);
  for (int64_t c = columns - columns % at::vec::Vectorized<A>::size(); c < columns; ++c) {
    distances += centred_row[c];
    squares += centred_row[c] * centred_row[c];
  }
  const A correction = distances / static_cast<A>(columns);
  const A variance = squares / static_cast<A>(columns) - correction * correction;
  moments = {sums.pivot, correction, A(1) / std::sqrt(variance + eps)};
  return !(correction * correction > variance);
}

// Writes x - pivot to `centred_row`.
template <typename T>
inline PivotSums<Acc<T>> centre_on_pivot(const T* x, int64_t columns, Acc<T>* centred_row) {
  using V = Vec<T>;
  constexpr int W = V::size();
  PivotSums<Acc<T>> sums;
  sums.pivot = pivot_of(x, columns);
  const V pivot(sums.pivot);
  const auto centre = [&](int64_t column, int64_t count, bool odd, auto full) {
    const V distance = load_vec(x + column, count, full) - pivot;
    store_vec(centred_row + column, distance, count, full);
    if constexpr (full) sums.add(odd, distance);
  };
  int64_t column = 0;
  for (; column + 2 * W <= columns; column += 2 * W) {
    centre(column, W, false, std::true_type());
    centre(column + W, W, true, std::true_type());
  }
  for_each_vector<W>(columns - column, [&](int64_t c, int64_t count, auto full) {
    centre(column + c, count, false, full);
  });
  return sums;
}

// The vector rounded to T, in the accumulation dtype.
template <typename T>
inline Vec<T> rounded(const Vec<T>& vector) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return vector;
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    return widen_bf16(round_to_bf16(vector));
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
 public:
  Parameter(const void* from, DType dtype, int64_t columns, A offset, A absent) {
    constexpr bool kDouble = std::is_same_v<A, double>;
    if (from != nullptr && offset == A(0) && (kDouble || dtype == DType::f32)) {
      values_ = static_cast<const A*>(from);
      return;
    }
    copy_ = Scratch<A>(columns, absent);
    values_ = copy_.data();
    if (from == nullptr) return;
    if (kDouble || dtype == DType::f32) {
      for (int64_t c = 0; c < columns; ++c) copy_[c] = static_cast<const A*>(from)[c] + offset;
    } else {
      const auto* half = static_cast<const c10::BFloat16*>(from);
      for (int64_t c = 0; c < columns; ++c) copy_[c] = static_cast<A>(half[c]) + offset;
    }
  }
  const A* get() const { return values_; }

 private:
  Scratch<A> copy_;
  const A* values_;
};

// Widens a row into `wide`, unless it is wide already, and returns its sum. Four accumulators hide
// the latency.
template <typename T>
inline Acc<T> widen_and_sum(const T* x, Acc<T>* wide, int64_t columns) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  constexpr bool kWiden = !std::is_same_v<T, A>;
  const int64_t blocked = columns - columns % (4 * W);
  V sum[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) {
      const V value = load_vec(x + c + k * W);
      if constexpr (kWiden) value.store(wide + c + k * W);
      sum[k] = sum[k] + value;
    }
  }
  A total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (int64_t c = blocked; c < columns; ++c) {
    const A value = static_cast<A>(x[c]);
    if constexpr (kWiden) wide[c] = value;
    total += value;
  }
  return total;
}

// Statistics of a wide row of sum `total`, which is written less its mean to `centred_row`.
template <typename A>
inline Moments<A> centre_row(const A* wide, A total, int64_t columns, A eps, A* centred_row) {
  using V = at::vec::Vectorized<A>;
  constexpr int W = V::size();
  const int64_t blocked = columns - columns % (4 * W);
  const A mean = total / static_cast<A>(columns);
  V first[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  V second[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) {
      const V centred = V::loadu(wide + c + k * W) - V(mean);
      centred.store(centred_row + c + k * W);
      first[k] = first[k] + centred;
      second[k] = at::vec::fmadd(centred, centred, second[k]);
    }
  }
  A deviation = sum_lanes((first[0] + first[1]) + (first[2] + first[3]));
  A squares = sum_lanes((second[0] + second[1]) + (second[2] + second[3]));
  for (int64_t c = blocked; c < columns; ++c) {
    const A centred = centred_row[c] = wide[c] - mean;
    deviation += centred;
    squares += centred * centred;
  }
  const A correction = deviation / static_cast<A>(columns);
  const A variance = squares / static_cast<A>(columns) - correction * correction;
  // Rounding may leave a variance just below zero; NaN must stay NaN.
  return {mean, correction, A(1) / std::sqrt((variance < A(0) ? A(0) : variance) + eps)};
}

// x * x, rounded: the compiler must not contract it with the addition that follows.
inline float square(float x) {
  float product = x * x;
#if defined(__x86_64__)
  asm("" : "+x"(product));
#endif
  return product;
}

inline double square(double x) {
  double product = x * x;
#if defined(__x86_64__)
  asm("" : "+x"(product));
#endif
  return product;
}

template <typename A>
inline at::vec::Vectorized<A> square(const at::vec::Vectorized<A>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<A, float>) {
    __m512 product = x * x;
    asm("" : "+v"(product));
    return product;
  } else {
    __m512d product = x * x;
    asm("" : "+v"(product));
    return product;
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<A, float>) {
    __m256 product = x * x;
    asm("" : "+x"(product));
    return product;
  } else {
    __m256d product = x * x;
    asm("" : "+x"(product));
    return product;
  }
#else
  return x * x;
#endif
}

// Widens a row as widen_and_sum does and returns the sum of its squares in the order of torch's
// sum over a contiguous dimension: vectors of 32 bytes (torch has no AVX-512 kernel for it), four
// side by side, in runs that are added in four levels; lanes and what is left over at the end.
template <typename T>
inline Acc<T> widen_and_sum_squares(const T* x, Acc<T>* wide, int64_t columns) {
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
      const V value = load_vec(x + c);
      if constexpr (!std::is_same_v<T, A>) value.store(wide + c);
      level[0][n] = level[0][n] + square(value);
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
  for (int64_t c = left; c < columns; ++c) {
    if constexpr (!std::is_same_v<T, A>) wide[c] = static_cast<A>(x[c]);
  }
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

// y = (x - correction) * rstd * weight + bias of a centred row x; without correction and bias when
// rows are not centred, and then, when `round_before_weight`, with x * rstd rounded to T.
template <typename T, typename O>
inline void normalize_row(const NormForward& a, bool stream, const Acc<T>* row,
                          const Moments<Acc<T>>& m, const Acc<T>* weight, const Acc<T>* bias,
                          int64_t start, O* output) {
  using V = Vec<T>;
  const V rstd(m.rstd), shift(-m.correction * m.rstd);
  const int64_t next = start + prefetch_distance<T>(a.columns);
  const bool adds = a.residual != nullptr;
  const T* next_input = static_cast<const T*>(a.input) + next;
  const T* next_residual = static_cast<const T*>(a.residual) + (adds ? next : 0);
  O* y = output + start;
  const auto walk = [&](const auto& normalized) {
    for_each_vector<V::size()>(a.columns, [&](int64_t c, int64_t count, auto full) {
      __builtin_prefetch(next_input + c, 0, 2);
      if (adds) __builtin_prefetch(next_residual + c, 0, 2);
      if (!stream) __builtin_prefetch(y + (next - start) + c, 1, 3);
      const V value = normalized(load_vec(row + c, count, full), c, count, full);
      store_or_stream(stream, y + c, value, count, full);
    });
  };
  if (a.mean != nullptr) {
    walk([&](const V& x, int64_t c, int64_t count, auto full) {
      return at::vec::fmadd(at::vec::fmadd(x, rstd, shift), load_vec(weight + c, count, full),
                            load_vec(bias + c, count, full));
    });
  } else if (std::is_same_v<T, Acc<T>> || !a.round_before_weight) {
    walk([&](const V& x, int64_t c, int64_t count, auto full) {
      return x * rstd * load_vec(weight + c, count, full);
    });
  } else {
    walk([&](const V& x, int64_t c, int64_t count, auto full) {
      return rounded<T>(x * rstd) * load_vec(weight + c, count, full);
    });
  }
}

// Rows that the backward takes at once: the sums of the parameter gradients are then read and
// written once for all of them (each row is still added in its turn). With AVX-512 one was fastest;
// with AVX2 (on Zen 4, 1024x1024) one took 4 to 9 % longer than two.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 1;
#else
constexpr int kRows = 2;
#endif

// What the gradient of a row is made of, beside its elements.
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
    const V h = load_vec(dy + c, count, full) * load_vec(weight + c, count, full);
    // h - mean(h) first: it is exactly 0 where the row is constant.
    return at::vec::fmadd(load_vec(x + c, count, full) - mean, along, h - across) * rstd;
  });
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
