// layer_norm on the CPU.
//
// Forward: a row is read from memory once and then from L1: mean, then centred sums, then the
// output. The second pass also sums the deviations themselves, which corrects the rounding of the
// mean: a mean of 1e4 with deviation 1 stays right. Traffic: input once, output once (streamed
// around the cache when it is larger than the cache).
//
// Backward, with xhat = (x - mean) * rstd and h = dy * weight:
//   dx      = rstd * (h - mean(h) - xhat * mean(h * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// Rows are cut into chunks that do not depend on the thread count; each adds its parameter
// gradients into a partial row that stays in L1, and the partial rows are added in order.
// Traffic: input and gradient once, dx once.
#include "layer_norm.h"

#include <cmath>

#include "../common/parallel.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
struct Moments {
  A mean;        // rounded mean
  A correction;  // true mean - rounded mean
  A rstd;
};

// Statistics of one row, by two passes over data in L1. Four accumulators hide the latency.
template <typename T>
inline Moments<Acc<T>> moments(const T* x, int64_t columns, Acc<T> eps) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t blocked = columns - columns % (4 * W);
  V sum[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) sum[k] = sum[k] + load_vec(x + c + k * W);
  }
  A total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (int64_t c = blocked; c < columns; ++c) total += static_cast<A>(x[c]);
  const A mean = total / static_cast<A>(columns);

  V first[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  V second[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) {
      const V centred = load_vec(x + c + k * W) - V(mean);
      first[k] = first[k] + centred;
      second[k] = at::vec::fmadd(centred, centred, second[k]);
    }
  }
  A deviation = sum_lanes((first[0] + first[1]) + (first[2] + first[3]));
  A squares = sum_lanes((second[0] + second[1]) + (second[2] + second[3]));
  for (int64_t c = blocked; c < columns; ++c) {
    const A centred = static_cast<A>(x[c]) - mean;
    deviation += centred;
    squares += centred * centred;
  }
  const A correction = deviation / static_cast<A>(columns);
  const A variance =
      std::max(A(0), squares / static_cast<A>(columns) - correction * correction);
  // max(0, NaN) is 0: let NaN through.
  return {mean, correction,
          A(1) / std::sqrt((squares == squares ? variance : squares) + eps)};
}

template <typename T, typename P, bool kStream>
void forward(const LayerNormForward& a) {
  using A = Acc<T>;
  using V = Vec<T>;
  const auto* weight = static_cast<const P*>(a.weight);
  const auto* bias = static_cast<const P*>(a.bias);
  const int64_t columns = a.columns;
  parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.input) + row * columns;
      T* y = static_cast<T*>(a.output) + row * columns;
      const auto m = moments(x, columns, static_cast<A>(a.eps));
      static_cast<A*>(a.mean)[row] = m.mean + m.correction;
      static_cast<A*>(a.rstd)[row] = m.rstd;
      const V mean(m.mean), correction(m.correction), rstd(m.rstd);
      for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        V value = ((load_vec(x + c, count, full) - mean) - correction) * rstd;
        if (weight != nullptr) value = value * load_vec(weight + c, count, full);
        if (bias != nullptr) value = value + load_vec(bias + c, count, full);
        store_vec<kStream>(y + c, value, count, full);
      });
    }
  });
}

// One row: dx when it is wanted, and the row's part of the parameter gradients.
template <typename T, typename P>
inline void backward_row(const LayerNormBackward& a, int64_t row, Acc<T>* dweight, Acc<T>* dbias) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t columns = a.columns;
  const T* dy = static_cast<const T*>(a.grad_output) + row * columns;
  const T* x = static_cast<const T*>(a.input) + row * columns;
  const auto* weight = static_cast<const P*>(a.weight);
  const A mean = static_cast<const A*>(a.mean)[row];
  const A rstd = static_cast<const A*>(a.rstd)[row];
  V sum_h(A(0)), sum_hx(A(0));
  for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
    const V grad = load_vec(dy + c, count, full);
    const V xhat = (load_vec(x + c, count, full) - V(mean)) * V(rstd);
    const V h = weight != nullptr ? grad * load_vec(weight + c, count, full) : grad;
    sum_h = sum_h + h;
    sum_hx = at::vec::fmadd(h, xhat, sum_hx);
    if (dweight != nullptr) {
      store_vec<false>(dweight + c, at::vec::fmadd(grad, xhat, load_vec(dweight + c, count, full)), count,
                   full);
    }
    if (dbias != nullptr) {
      store_vec<false>(dbias + c, grad + load_vec(dbias + c, count, full), count, full);
    }
  });
  if (a.grad_input == nullptr) return;
  T* dx = static_cast<T*>(a.grad_input) + row * columns;
  const V mean_h(sum_lanes(sum_h) / static_cast<A>(columns));
  const V mean_hx(sum_lanes(sum_hx) / static_cast<A>(columns));
  for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
    const V grad = load_vec(dy + c, count, full);
    const V xhat = (load_vec(x + c, count, full) - V(mean)) * V(rstd);
    const V h = weight != nullptr ? grad * load_vec(weight + c, count, full) : grad;
    store_vec<false>(dx + c, V(rstd) * (h - mean_h - xhat * mean_hx), count, full);
  });
}

template <typename T, typename P>
void backward(const LayerNormBackward& a) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  if (a.partials == nullptr) {
    parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) backward_row<T, P>(a, row, nullptr, nullptr);
    });
    return;
  }
  const Chunks chunks(a.rows);
  auto* partials = static_cast<A*>(a.partials);
  const int64_t bytes_per_chunk = 3 * columns * sizeof(T) * chunks.rows_per_chunk;
  parallel_rows(chunks.count, bytes_per_chunk, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      A* dweight = partials + chunk * 2 * columns;
      A* dbias = dweight + columns;
      std::fill(dweight, dweight + 2 * columns, A(0));
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) {
        backward_row<T, P>(a, row, a.grad_weight != nullptr ? dweight : nullptr,
                           a.grad_bias != nullptr ? dbias : nullptr);
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

void layer_norm_forward(const LayerNormForward& a) {
  switch_dtypes(a.dtype, a.parameter_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    if (should_stream(static_cast<const T*>(a.output), a.rows, a.columns)) {
      forward<T, P, true>(a);
    } else {
      forward<T, P, false>(a);
    }
  });
}

void layer_norm_backward(const LayerNormBackward& a) {
  switch_dtypes(a.dtype, a.parameter_dtype,
                [&](auto t, auto p) { backward<decltype(t), decltype(p)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
