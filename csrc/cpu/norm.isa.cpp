// The norms on the CPU: rows of the input, or of residual + dropout(input), are centred or not,
// scaled to deviation (or root mean square) 1, and multiplied by the weight. What happens to a row
// is in norm_rows.h, the mask in dropout.h.
//
// Traffic of the forward: input (and residual) once, output (and sum) once. A sum is rounded before
// it is normalised, and stands wide in L1. Backward: the gradients and what was normalised once,
// the gradients of input and residual once; where those are equal, only one is written. Outputs
// that are larger than the cache are streamed around it.
//
// Rows of the backward are cut into chunks that do not depend on the thread count; each adds its
// parameter gradients into a partial row that stays in L1, and the partial rows are added in order.
#include "norm.h"

#include "../common/parallel.h"
#include "dropout.h"
#include "norm_rows.h"
#include "scratch.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// summed = residual + dropout(input), rounded to T. When kCentred, `wide` becomes summed - pivot,
// of which the sums are returned, as centre_on_pivot would do it; else it becomes summed.
template <typename I, typename T, bool kDropout, bool kCentred>
PivotSums<Acc<T>> add_row(const NormForward& a, bool stream, int64_t start, Acc<T>* wide) {
  using V = Vec<T>;
  constexpr int W = V::size();
  const I* x = static_cast<const I*>(a.input) + start;
  const T* r = static_cast<const T*>(a.residual) + start;
  T* summed = static_cast<T*>(a.summed) + start;
  PivotSums<Acc<T>> sums;
  const auto add = [&](int64_t from, int64_t to, const auto& keep) {
    for_each_dropped<T, kDropout>(
        a.dropout, start + from, to - from,
        [&](int64_t column, int64_t count, auto full, const auto& dropped) {
          const int64_t c = from + column;
          const V added = dropped(load_vec(x + c, count, full));
          const V sum = rounded<T>(load_vec(r + c, count, full) + added);
          store_or_stream(stream, summed + c, sum, count, full);
          keep(c, sum, count, full);
        });
  };
  const auto store = [&](int64_t c, const V& sum, int64_t count, auto full) {
    store_vec(wide + c, sum, count, full);
  };
  if constexpr (!kCentred) {
    add(0, a.columns, store);
  } else {
    // The pivot is known once its columns are.
    const int64_t head = std::min(kPivotColumns<T>, a.columns);
    add(0, head, store);
    sums = centre_on_pivot(wide, head, wide);
    const V pivot(sums.pivot);
    add(head, a.columns, [&](int64_t c, const V& sum, int64_t count, auto full) {
      const V distance = sum - pivot;
      store_vec(wide + c, distance, count, full);
      if constexpr (full) sums.add(c / W % 2 != 0, distance);
    });
  }
  return sums;
}

template <typename T, bool kCentred>
PivotSums<Acc<T>> add_row(const NormForward& a, bool stream, int64_t start, Acc<T>* wide) {
  const auto add = [&](auto input) {
    using I = decltype(input);
    return a.dropout.active() ? add_row<I, T, true, kCentred>(a, stream, start, wide)
                              : add_row<I, T, false, kCentred>(a, stream, start, wide);
  };
  if constexpr (std::is_same_v<T, float>) {
    if (a.input_dtype == DType::bf16) return add(c10::BFloat16());
  }
  return add(T());
}

// Writes a row, centred, to `centred_row` (after the sum with the residual, if there is one, to
// summed) and returns its statistics.
template <typename T>
Moments<Acc<T>> centred_moments(const NormForward& a, bool stream, int64_t start,
                                Acc<T>* centred_row) {
  using A = Acc<T>;
  const T* x = static_cast<const T*>(a.input) + start;
  const T* source = a.residual != nullptr ? static_cast<const T*>(a.summed) + start : x;
  const A eps = static_cast<A>(a.eps);
  const PivotSums<A> sums = a.residual != nullptr ? add_row<T, true>(a, stream, start, centred_row)
                                                  : centre_on_pivot(x, a.columns, centred_row);
  Moments<A> moments;
  if (pivoted_moments(sums, centred_row, a.columns, eps, moments)) return moments;
  const A total = widen_and_sum(source, centred_row, a.columns);
  const A* wide = centred_row;
  if constexpr (std::is_same_v<T, A>) wide = source;
  return centre_row(wide, total, a.columns, eps, centred_row);
}

template <typename T>
void forward(const NormForward& a) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  const bool adds = a.residual != nullptr;
  // Two outputs of this size together fill the cache.
  const int64_t outputs = adds ? 2 : 1;
  const bool stream = should_stream(static_cast<const T*>(a.output), outputs * a.rows, columns) &&
                      should_stream(static_cast<const T*>(a.summed), outputs * a.rows, columns);
  const int64_t bytes = (adds ? 4 : 2) * columns * sizeof(T);
  parallel_rows(a.rows, bytes, [&](int64_t begin, int64_t end) {
    const Parameter<A> weight(a.weight, a.parameter_dtype, columns, A(a.weight_offset), A(1)),
        bias(a.bias, a.parameter_dtype, columns, A(0), A(-0.0));
    Scratch<A> scratch(columns);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row * columns;
      const T* x = static_cast<const T*>(a.input) + start;
      const A* wide = scratch.data();
      const A eps = static_cast<A>(a.eps);
      Moments<A> m;
      if (a.mean != nullptr) {
        m = centred_moments<T>(a, stream, start, scratch.data());
        static_cast<A*>(a.mean)[row] = m.mean + m.correction;
      } else {
        if (adds) {
          add_row<T, false>(a, stream, start, scratch.data());
        } else if constexpr (std::is_same_v<T, A>) {
          wide = x;
        }
        const A squares = adds ? widen_and_sum_squares(wide, scratch.data(), columns)
                               : widen_and_sum_squares(x, scratch.data(), columns);
        m = mean_square_moments(squares, columns, eps);
      }
      static_cast<A*>(a.rstd)[row] = m.rstd;
      const auto normalize = [&](auto output) {
        using O = decltype(output);
        normalize_row<T>(a, stream, wide, m, weight.get(), bias.get(), start,
                         static_cast<O*>(a.output));
      };
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        a.output_dtype == DType::f32 ? normalize(float()) : normalize(T());
      } else {
        normalize(T());
      }
    }
  });
}

// Writes the gradients of a row whose sum has the gradient dx_at(c, count, full).
template <typename I, typename T, bool kDropout, typename F>
void write_row(const NormBackward& a, bool stream, int64_t row, const F& dx_at) {
  const int64_t start = row * a.columns;
  const T* ds = a.grad_summed != nullptr ? static_cast<const T*>(a.grad_summed) + start : nullptr;
  I* dx = a.grad_input != nullptr ? static_cast<I*>(a.grad_input) + start : nullptr;
  T* dr = a.grad_residual != nullptr ? static_cast<T*>(a.grad_residual) + start : nullptr;
  const int64_t ahead = prefetch_distance<T>(a.columns);
  for_each_dropped<T, kDropout>(a.dropout, start, a.columns,
                                [&](int64_t c, int64_t count, auto full, const auto& dropped) {
                                  Vec<T> total = dx_at(c, count, full);
                                  if (!stream && dx != nullptr)
                                    __builtin_prefetch(dx + ahead + c, 1, 3);
                                  if (ds != nullptr) total = total + load_vec(ds + c, count, full);
                                  if (dr != nullptr)
                                    store_or_stream(stream, dr + c, total, count, full);
                                  if (dx != nullptr)
                                    store_or_stream(stream, dx + c, dropped(total), count, full);
                                });
}

template <typename T, typename F>
void write_row(const NormBackward& a, bool stream, int64_t row, const F& dx_at) {
  const auto write = [&](auto input) {
    using I = decltype(input);
    a.dropout.active() && a.grad_input != nullptr ? write_row<I, T, true>(a, stream, row, dx_at)
                                                  : write_row<I, T, false>(a, stream, row, dx_at);
  };
  if constexpr (std::is_same_v<T, float>) {
    if (a.input_dtype == DType::bf16) return write(c10::BFloat16());
  }
  write(T());
}

template <typename T>
void backward(const NormBackward& a) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  // A null pointer is aligned to anything; no I is larger than T.
  const bool stream = should_stream(static_cast<const T*>(a.grad_input), a.rows, columns) &&
                      should_stream(static_cast<const T*>(a.grad_residual), a.rows, columns);
  const bool wants_rows = a.grad_input != nullptr || a.grad_residual != nullptr;
  if (a.grad_output == nullptr) {
    if (!wants_rows) return;
    parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        write_row<T>(a, stream, row, [](int64_t, int64_t, auto) { return Vec<T>(A(0)); });
      }
    });
    return;
  }
  const Chunks chunks(a.rows);
  const int64_t bytes_per_chunk = 3 * columns * sizeof(T) * chunks.rows_per_chunk;
  parallel_rows(chunks.count, bytes_per_chunk, [&](int64_t first, int64_t last) {
    const Parameter<A> weight(a.weight, a.parameter_dtype, columns, A(a.weight_offset), A(1));
    Scratch<A> unwanted(a.partials == nullptr ? 2 * columns : 0);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      A* dweight = a.partials == nullptr ? unwanted.data()
                                         : static_cast<A*>(a.partials) + chunk * 2 * columns;
      A* dbias = dweight + columns;
      std::fill(dweight, dweight + (a.mean != nullptr ? 2 : 1) * columns, A(0));
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk);) {
        RowGradient<A> gradients[kRows];
        int count = 1;
        const auto reduce = [&](auto together) {
          count = together;
          a.mean != nullptr
              ? reduce_rows<T, true, together>(a, row, weight.get(), dweight, dbias, gradients)
              : reduce_rows<T, false, together>(a, row, weight.get(), dweight, dbias, gradients);
        };
        row + kRows <= chunks.end(chunk) ? reduce(std::integral_constant<int, kRows>())
                                         : reduce(std::integral_constant<int, 1>());
        for (int r = 0; wants_rows && r < count; ++r) {
          with_row_gradient<T>(a, row + r, gradients[r], weight.get(),
                               [&](const auto& dx_at) { write_row<T>(a, stream, row + r, dx_at); });
        }
        row += count;
      }
    }
  });
  const auto* partials = static_cast<const A*>(a.partials);
  const auto sum = [&](auto parameter) {
    using P = decltype(parameter);
    if (a.grad_weight != nullptr) {
      sum_partials(partials, chunks.count, 2 * columns, columns, static_cast<P*>(a.grad_weight));
    }
    if (a.grad_bias != nullptr) {
      sum_partials(partials + columns, chunks.count, 2 * columns, columns,
                   static_cast<P*>(a.grad_bias));
    }
  };
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    a.parameter_dtype == DType::f32 ? sum(float()) : sum(T());
  } else {
    sum(T());
  }
}

}  // namespace

void norm_forward(const NormForward& a) {
  switch_dtype(a.dtype, [&](auto t) { forward<decltype(t)>(a); });
}

void norm_backward(const NormBackward& a) {
  switch_dtype(a.dtype, [&](auto t) { backward<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
