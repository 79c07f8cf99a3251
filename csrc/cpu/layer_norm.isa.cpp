// layer_norm on the CPU.
//
// Forward: a row is read from memory once, widened into a scratch row that stays in L1, and walked
// there: mean, then centred sums, then the output. The second pass also sums the deviations
// themselves, which corrects the rounding of the mean: a mean of 1e4 with deviation 1 stays right.
// Traffic: input once, output once (streamed around the cache when it is larger than the cache).
//
// Backward, with xhat = (x - mean) * rstd and h = dy * weight:
//   dx      = rstd * (h - mean(h) - xhat * mean(h * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// Rows are cut into chunks that do not depend on the thread count; each adds its parameter
// gradients into a partial row that stays in L1, and the partial rows are added in order.
// Traffic: input and gradient once, dx once.
#include "layer_norm.h"

#include <cmath>
#include <vector>

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

// Widens a row into `wide` and returns its statistics. Four accumulators hide the latency.
template <typename T>
inline Moments<Acc<T>> moments(const T* x, Acc<T>* wide, int64_t columns, Acc<T> eps) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t blocked = columns - columns % (4 * W);
  V sum[4] = {V(A(0)), V(A(0)), V(A(0)), V(A(0))};
  for (int64_t c = 0; c < blocked; c += 4 * W) {
    for (int k = 0; k < 4; ++k) {
      const V value = load_vec(x + c + k * W);
      value.store(wide + c + k * W);
      sum[k] = sum[k] + value;
    }
  }
  A total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (int64_t c = blocked; c < columns; ++c) total += wide[c] = static_cast<A>(x[c]);
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

template <typename T, typename P, bool kStream>
void forward(const LayerNormForward& a) {
  using A = Acc<T>;
  using V = Vec<T>;
  const int64_t columns = a.columns;
  parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    const Widened<P> weights(a.weight, columns), biases(a.bias, columns);
    const A* weight = weights.get();
    const A* bias = biases.get();
    std::vector<A> wide(columns);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.input) + row * columns;
      T* y = static_cast<T*>(a.output) + row * columns;
      const auto m = moments(x, wide.data(), columns, static_cast<A>(a.eps));
      static_cast<A*>(a.mean)[row] = m.mean + m.correction;
      static_cast<A*>(a.rstd)[row] = m.rstd;
      const V mean(m.mean), correction(m.correction), rstd(m.rstd);
      const auto normalize = [&](auto with_parameters) {
        for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
          V value = ((load_vec(&wide[c], count, full) - mean) - correction) * rstd;
          if constexpr (decltype(with_parameters)::value) {
            value = at::vec::fmadd(value, load_vec(weight + c, count, full),
                                   load_vec(bias + c, count, full));
          } else {
            if (weight != nullptr) value = value * load_vec(weight + c, count, full);
            if (bias != nullptr) value = value + load_vec(bias + c, count, full);
          }
          store_vec<kStream>(y + c, value, count, full);
        });
      };
      if (weight != nullptr && bias != nullptr) {
        normalize(std::true_type());
      } else {
        normalize(std::false_type());
      }
    }
  });
}

// Rows that the backward takes at once: the sums of the parameter gradients are then read and
// written once for all of them (each row is still added in its turn).
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif

// R rows: dx when it is wanted, and their part of the parameter gradients. dweight and dbias are
// the sums so far, or null; weight is widened, or null.
template <typename T, bool kStream, int R>
inline void backward_rows(const LayerNormBackward& a, int64_t row, const Acc<T>* weight,
                          Acc<T>* dweight, Acc<T>* dbias) {
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
    if (dweight != nullptr) store_vec<false>(dweight + c, dw, count, full);
    if (dbias != nullptr) store_vec<false>(dbias + c, db, count, full);
  });
  if (a.grad_input == nullptr) return;
  for (int r = 0; r < R; ++r) {
    T* dx = static_cast<T*>(a.grad_input) + (row + r) * columns;
    // dx = rstd * h - (xhat * rstd * mean(h * xhat) + rstd * mean(h))
    const A scale = static_cast<const A*>(a.rstd)[row + r];
    const V across(scale * (sum_lanes(sum_h[r]) / static_cast<A>(columns)));
    const V along(scale * (sum_lanes(sum_hx[r]) / static_cast<A>(columns)));
    for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
      const V w = weight != nullptr ? load_vec(weight + c, count, full) : V(A(1));
      const V h = load_vec(dy + r * columns + c, count, full) * w;
      const V xhat = (load_vec(x + r * columns + c, count, full) - mean[r]) * rstd[r];
      store_vec<kStream>(dx + c, h * rstd[r] - at::vec::fmadd(xhat, along, across), count, full);
    });
  }
}

template <typename T, typename P, bool kStream>
void backward(const LayerNormBackward& a) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  const Chunks chunks(a.rows);
  auto* partials = static_cast<A*>(a.partials);
  const int64_t bytes_per_chunk = 3 * columns * sizeof(T) * chunks.rows_per_chunk;
  parallel_rows(chunks.count, bytes_per_chunk, [&](int64_t first, int64_t last) {
    const Widened<P> widened(a.weight, columns);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      A* sums = partials != nullptr ? partials + chunk * 2 * columns : nullptr;
      if (sums != nullptr) std::fill(sums, sums + 2 * columns, A(0));
      A* dweight = a.grad_weight != nullptr ? sums : nullptr;
      A* dbias = a.grad_bias != nullptr ? sums + columns : nullptr;
      int64_t row = chunks.begin(chunk);
      for (; row + kRows <= chunks.end(chunk); row += kRows) {
        backward_rows<T, kStream, kRows>(a, row, widened.get(), dweight, dbias);
      }
      for (; row < chunks.end(chunk); ++row) {
        backward_rows<T, kStream, 1>(a, row, widened.get(), dweight, dbias);
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
  switch_dtypes(a.dtype, a.parameter_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    if (a.grad_input != nullptr &&
        should_stream(static_cast<const T*>(a.grad_input), a.rows, a.columns)) {
      backward<T, P, true>(a);
    } else {
      backward<T, P, false>(a);
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
