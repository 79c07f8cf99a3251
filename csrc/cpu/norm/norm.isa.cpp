// The norms on the CPU: rows of the input, or of residual + dropout(input), are centred or not,
// scaled to deviation (or root mean square) 1, and multiplied by the weight. What happens to a row
// is in norm_rows.h, the mask in dropout.h.
//
// Traffic of the forward: input (and residual) once, output (and sum) once. A sum is rounded before
// it is normalised, and is in L1 in the wide type. Backward: the gradients and what was normalised
// once, the gradients of input and residual once; where those are equal, only one is written.
// Outputs that are larger than the cache are streamed around it.
//
// Rows of the backward are cut into chunks that do not depend on the thread count; each adds its
// parameter gradients into a partial row that stays in L1, and the partial rows are added in order.
#include "norm.h"

#include "../../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vec.h"
#include "../elementwise/dropout.h"
#include "norm_rows.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Columns from .. to - 1 of summed = residual + dropout(input), rounded to T; also to `kept`,
// unless that is null. Calls visit(sum, full) with the vectors of the sum.
template <typename I, typename T, bool kDropout, typename Visit>
void add_columns(const NormForward& a, bool stream, int64_t start, int64_t from, int64_t to,
                 Acc<T>* kept, const Visit& visit) {
  const I* x = static_cast<const I*>(a.input) + start;
  const T* r = static_cast<const T*>(a.residual) + start;
  T* summed = static_cast<T*>(a.summed) + start;
  for_each_dropped<T, kDropout>(a.dropout, start + from, to - from,
                                [&](int64_t column, int64_t count, auto full, const auto& dropped) {
                                  const int64_t c = from + column;
                                  const Vec<T> added = dropped(load_vec(x + c, count, full));
                                  const Vec<T> sum =
                                      rounded<T>(load_vec(r + c, count, full) + added);
                                  store_or_stream(stream, summed + c, sum, count, full);
                                  if (kept != nullptr) store_vec(kept + c, sum, count, full);
                                  visit(sum, full);
                                });
}

// Writes the sum of a row, which `source` then has too, and returns its statistics.
template <typename I, typename T, bool kCentred, bool kDropout>
Moments<Acc<T>> add_row(const NormForward& a, bool stream, int64_t start, Acc<T>* kept,
                        const Acc<T>* source) {
  using A = Acc<T>;
  constexpr int W = Vec<T>::size();
  const int64_t columns = a.columns;
  const A eps = static_cast<A>(a.eps);
  const auto add = [&](int64_t from, int64_t to, const auto& visit) {
    add_columns<I, T, kDropout>(a, stream, start, from, to, kept, visit);
  };
  if constexpr (!kCentred) {
    add(0, columns, Nothing());
    return mean_square_moments(sum_squares(source, columns, Nothing()), columns, eps);
  } else {
    // The pivot is known once its columns are.
    const int64_t head = std::min(kPivotColumns<A>, columns);
    add(0, head, Nothing());
    PivotSums<A> sums(source, columns);
    for (int64_t c = 0; c + W <= head; c += W) sums.add(load_vec(source + c));
    add(head, columns, [&](const Vec<T>& sum, auto full) {
      if constexpr (full) sums.add(sum);
    });
    return pivoted_moments(sums, source, columns, eps);
  }
}

// The same of a row that is summed in pieces. A function of its own: a loop of pieces in the one
// above cost all other rows a third of their time, a look at the length a twentieth.
template <typename I, typename T, bool kDropout>
__attribute__((noinline)) Moments<Acc<T>> add_long_row(const NormForward& a, bool stream,
                                                       int64_t start, Acc<T>* kept,
                                                       const Acc<T>* source) {
  using A = Acc<T>;
  add_columns<I, T, kDropout>(a, stream, start, 0, a.columns, kept, Nothing());
  const auto sums = sum_from_pivot(source, a.columns, Nothing());
  return pivoted_moments(sums, source, a.columns, static_cast<A>(a.eps));
}

template <typename I, typename T, typename O, bool kCentred, bool kDropout>
void forward_of_sum(const NormForward& a) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  // Two outputs of half that size together fill the cache.
  const bool stream = should_stream(static_cast<const T*>(a.output), 2 * a.rows, columns) &&
                      should_stream(static_cast<const T*>(a.summed), 2 * a.rows, columns);
  // What is streamed is not in the cache, and half precision would be widened twice.
  const bool keeps = stream || !std::is_same_v<T, A>;
  const int64_t ahead = prefetch_distance<T>(columns);
  parallel_rows(a.rows, 4 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    const RowParameters<A> parameters(a);
    Scratch<A> scratch(keeps ? columns : 0);
    A* kept = keeps ? scratch.data() : nullptr;
    RowWriter<T, A, O, kCentred> writer(a, stream, parameters);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row * columns;
      const A* source = keeps ? kept : static_cast<const A*>(a.summed) + start;
      const auto moments = kCentred && columns > kPieceColumns
                               ? add_long_row<I, T, kDropout>(a, stream, start, kept, source)
                               : add_row<I, T, kCentred, kDropout>(a, stream, start, kept, source);
      writer.start(row, source, moments);
      const I* next_input = static_cast<const I*>(a.input) + start + ahead;
      const T* next_residual = static_cast<const T*>(a.residual) + start + ahead;
      for_each_vector<Vec<T>::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        __builtin_prefetch(next_input + c, 0, 2);
        __builtin_prefetch(next_residual + c, 0, 2);
        writer(c, count, full);
      });
    }
  });
}

template <typename T, typename O, bool kCentred>
void forward_alone(const NormForward& a) {
  using A = Acc<T>;
  const int64_t columns = a.columns;
  const bool stream = should_stream(static_cast<const T*>(a.output), a.rows, columns);
  const A eps = static_cast<A>(a.eps);
  parallel_rows(a.rows, 2 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    const RowParameters<A> parameters(a);
    RowWriter<T, T, O, kCentred> writer(a, stream, parameters);  // of the row before
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.input) + row * columns;
      if constexpr (kCentred) {
        writer.start(row, x, pivoted_moments(sum_from_pivot(x, columns, writer), x, columns, eps));
      } else {
        writer.start(row, x, mean_square_moments(sum_squares(x, columns, writer), columns, eps));
      }
    }
    for_each_vector<Vec<T>::size()>(columns, writer);
  });
}

template <typename T, typename O>
void forward(const NormForward& a) {
  if (a.residual == nullptr) {
    return a.mean != nullptr ? forward_alone<T, O, true>(a) : forward_alone<T, O, false>(a);
  }
  const auto add = [&](auto input, auto drops) {
    using I = decltype(input);
    a.mean != nullptr ? forward_of_sum<I, T, O, true, drops>(a)
                      : forward_of_sum<I, T, O, false, drops>(a);
  };
  const auto run = [&](auto input) {
    a.dropout.active() ? add(input, std::true_type()) : add(input, std::false_type());
  };
  switch_beside<T>(a.input_dtype, run);
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
  switch_beside<T>(a.input_dtype, write);
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
  if constexpr (kIsHalf<T>) {
    a.parameter_dtype == DType::f32 ? sum(float()) : sum(T());
  } else {
    sum(T());
  }
}

}  // namespace

void norm_forward(const NormForward& a) {
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (kIsHalf<T>) {
      if (a.output_dtype == DType::f32) return forward<T, float>(a);
    }
    forward<T, T>(a);
  });
}

void norm_backward(const NormBackward& a) {
  switch_dtype(a.dtype, [&](auto t) { backward<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
