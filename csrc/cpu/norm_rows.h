// Rows of layer_norm, forward and backward: what layer_norm and add_layer_norm do alike. Include
// from *.isa.cpp only.
//
// Forward: a row stands widened in a scratch row that stays in L1 and is walked there: mean, then
// centred sums, then the output. The second pass also sums the deviations themselves, which
// corrects the rounding of the mean: a mean of 1e4 with deviation 1 stays right.
//
// Backward, with xhat = (x - mean) * rstd and h = dy * weight:
//   dx      = rstd * (h - mean(h) - xhat * mean(h * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// Rows are cut into chunks that do not depend on the thread count; each adds its parameter
// gradients into a partial row that stays in L1, and the partial rows are added in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../common/parallel.h"
#include "layer_norm.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
struct Moments {
  A mean;        // rounded mean
  A correction;  // true mean - rounded mean
  A rstd;
};

// Widens a row into `wide` and returns its sum; x may be `wide` itself. Four accumulators hide the
// latency.
template <typename T>
inline Acc<T> widen_and_sum(const T* x, Acc<T>* wide, int64_t columns) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t blocked = columns - columns % (4 * W);
  V sum[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) {
      const V value = load_vec(x + c + k * W);
      if (static_cast<const void*>(x) != wide) value.store(wide + c + k * W);
      sum[k] = sum[k] + value;
    }
  }
  A total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (int64_t c = blocked; c < columns; ++c) total += wide[c] = static_cast<A>(x[c]);
  return total;
}

// Statistics of a widened row of sum `total`.
template <typename A>
inline Moments<A> moments(const A* wide, A total, int64_t columns, A eps) {
  using V = at::vec::Vectorized<A>;
  constexpr int W = V::size();
  const int64_t blocked = columns - columns % (4 * W);
  const A mean = total / static_cast<A>(columns);
  V first[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  V second[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) {
      const V centred = V::loadu(wide + c + k * W) - V(mean);
      first[k] = first[k] + centred;
      second[k] = at::vec::fmadd(centred, centred, second[k]);
    }
  }
  A deviation = sum_lanes((first[0] + first[1]) + (first[2] + first[3]));
  A squares = sum_lanes((second[0] + second[1]) + (second[2] + second[3]));
  for (int64_t c = blocked; c < columns; ++c) {
    const A centred = wide[c] - mean;
    deviation += centred;
    squares += centred * centred;
  }
  const A correction = deviation / static_cast<A>(columns);
  const A variance = squares / static_cast<A>(columns) - correction * correction;
  // Rounding may leave a variance just below zero; NaN must stay NaN.
  return {mean, correction, A(1) / std::sqrt((variance < A(0) ? A(0) : variance) + eps)};
}

// The parameters in accumulation dtype, or null: converted once a task instead of once a row.
template <typename P>
class Widened {
 public:
  Widened(const void* parameter, int64_t columns) {
    const auto* from = static_cast<const P*>(parameter);
    if (from == nullptr) return;
    if constexpr (std::is_same_v<P, Acc<P>>) {
      values_ = from;
    } else {
      copy_.assign(from, from + columns);
      values_ = copy_.data();
    }
  }
  const Acc<P>* get() const { return values_; }

 private:
  std::vector<Acc<P>> copy_;
  const Acc<P>* values_ = nullptr;
};

// y = (wide - mean) * rstd * weight + bias.
template <typename T>
inline void normalize_row(bool stream, const Acc<T>* wide, const Moments<Acc<T>>& m,
                          const Acc<T>* weight, const Acc<T>* bias, T* y, int64_t columns) {
  using V = Vec<T>;
  const V mean(m.mean), correction(m.correction), rstd(m.rstd);
  const auto walk = [&](auto with_parameters) {
    for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
      V value = ((load_vec(wide + c, count, full) - mean) - correction) * rstd;
      if constexpr (decltype(with_parameters)::value) {
        value = at::vec::fmadd(value, load_vec(weight + c, count, full),
                               load_vec(bias + c, count, full));
      } else {
        if (weight != nullptr) value = value * load_vec(weight + c, count, full);
        if (bias != nullptr) value = value + load_vec(bias + c, count, full);
      }
      store_or_stream(stream, y + c, value, count, full);
    });
  };
  if (weight != nullptr && bias != nullptr) {
    walk(std::true_type());
  } else {
    walk(std::false_type());
  }
}

// Rows that the backward takes at once: the sums of the parameter gradients are then read and
// written once for all of them (each row is still added in its turn).
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif

// R rows: their part of the parameter gradients, then for each row finish(row, dx_at), where
// dx_at(c, count, full) computes the vector of dx at a column. dweight and dbias are the sums so
// far, or null; weight is widened, or null.
template <typename T, int R, typename Finish>
inline void backward_rows(const LayerNormBackward& a, int64_t row, const Acc<T>* weight,
                          Acc<T>* dweight, Acc<T>* dbias, bool wants_rows, const Finish& finish) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t columns = a.columns;
  const T* dy = static_cast<const T*>(a.grad_output) + row * columns;
  const T* x = static_cast<const T*>(a.input) + row * columns;
  V mean[R], rstd[R], sum_h[R], sum_hx[R];
  for (int r = 0; r < R; ++r) {
    mean[r] = V(static_cast<const A*>(a.mean)[row + r]);
    rstd[r] = V(static_cast<const A*>(a.rstd)[row + r]);
    sum_h[r] = sum_hx[r] = V(A(0));
  }
  for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
    const V w = weight != nullptr ? load_vec(weight + c, count, full) : V(A(1));
    V dw = dweight != nullptr ? load_vec(dweight + c, count, full) : V(A(0));
    V db = dbias != nullptr ? load_vec(dbias + c, count, full) : V(A(0));
    for (int r = 0; r < R; ++r) {
      const V grad = load_vec(dy + r * columns + c, count, full);
      const V xhat = (load_vec(x + r * columns + c, count, full) - mean[r]) * rstd[r];
      const V h = grad * w;
      sum_h[r] = sum_h[r] + h;
      sum_hx[r] = at::vec::fmadd(h, xhat, sum_hx[r]);
      dw = at::vec::fmadd(grad, xhat, dw);
      db = db + grad;
    }
    if (dweight != nullptr) store_vec(dweight + c, dw, count, full);
    if (dbias != nullptr) store_vec(dbias + c, db, count, full);
  });
  if (!wants_rows) return;
  for (int r = 0; r < R; ++r) {
    // h - mean(h) first: it is exactly 0 where the row is constant.
    const V across(sum_lanes(sum_h[r]) / static_cast<A>(columns));
    const V along(-sum_lanes(sum_hx[r]) / static_cast<A>(columns));
    finish(row + r, [&](int64_t c, int64_t count, auto full) {
      // The next rows: R short streams at once are more than the hardware foresees.
      __builtin_prefetch(dy + (r + R) * columns + c, 0, 2);
      __builtin_prefetch(x + (r + R) * columns + c, 0, 2);
      const V w = weight != nullptr ? load_vec(weight + c, count, full) : V(A(1));
      const V h = load_vec(dy + r * columns + c, count, full) * w;
      const V xhat = (load_vec(x + r * columns + c, count, full) - mean[r]) * rstd[r];
      return at::vec::fmadd(xhat, along, h - across) * rstd[r];
    });
  }
}

// All rows; `finish` as in backward_rows, called when wants_rows. a.grad_input is not read.
template <typename T, typename P, typename Finish>
void backward_all(const LayerNormBackward& a, bool wants_rows, const Finish& finish) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  const Chunks chunks(a.rows);
  auto* partials = static_cast<A*>(a.partials);
  const int64_t bytes_per_chunk = 3 * columns * sizeof(T) * chunks.rows_per_chunk;
  parallel_rows(chunks.count, bytes_per_chunk, [&](int64_t first, int64_t last) {
    const Widened<P> weight(a.weight, columns);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      A* sums = partials != nullptr ? partials + chunk * 2 * columns : nullptr;
      if (sums != nullptr) std::fill(sums, sums + 2 * columns, A(0));
      A* dweight = a.grad_weight != nullptr ? sums : nullptr;
      A* dbias = a.grad_bias != nullptr ? sums + columns : nullptr;
      int64_t row = chunks.begin(chunk);
      for (; row + kRows <= chunks.end(chunk); row += kRows) {
        backward_rows<T, kRows>(a, row, weight.get(), dweight, dbias, wants_rows, finish);
      }
      for (; row < chunks.end(chunk); ++row) {
        backward_rows<T, 1>(a, row, weight.get(), dweight, dbias, wants_rows, finish);
      }
    }
  });
  if (a.grad_weight != nullptr) {
    sum_partials(partials, chunks.count, 2 * columns, columns, static_cast<P*>(a.grad_weight));
  }
  if (a.grad_bias != nullptr) {
    sum_partials(partials + columns, chunks.count, 2 * columns, columns,
                 static_cast<P*>(a.grad_bias));
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
