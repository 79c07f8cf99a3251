// bias_dropout_add on the CPU: output = residual + dropout(input + bias), one pass.
//
// Traffic: input and residual once, output once (streamed around the cache when it is larger than
// the cache). The mask is drawn, never stored. Backward: grad_input = dropout(grad_output), the
// bias gradient its sum over rows; rows are cut into chunks that do not depend on the thread count,
// and the chunks' partial sums are added in order.
#include "bias_dropout_add.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/vec.h"
#include "dropout.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// I, B, T: dtypes of input, bias, and residual and output.
template <typename I, typename B, typename T, bool kDropout>
void forward(const BiasDropoutAddForward& a) {
  const bool stream = should_stream(static_cast<const T*>(a.output), a.rows, a.columns);
  using V = Vec<T>;
  const auto* bias = static_cast<const B*>(a.bias);
  const int64_t columns = a.columns;
  parallel_rows(a.rows, columns * (sizeof(I) + 2 * sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row * columns;
      const I* x = static_cast<const I*>(a.input) + start;
      const T* r = static_cast<const T*>(a.residual) + start;
      T* y = static_cast<T*>(a.output) + start;
      for_each_dropped<T, kDropout>(a.dropout, start, columns,
                                    [&](int64_t c, int64_t count, auto full, const auto& dropped) {
                                      V value = load_vec(x + c, count, full);
                                      if (bias != nullptr)
                                        value = value + load_vec(bias + c, count, full);
                                      value = load_vec(r + c, count, full) + dropped(value);
                                      store_or_stream(stream, y + c, value, count, full);
                                    });
    }
  });
}

template <typename I, typename B, typename T, bool kDropout>
void backward(const BiasDropoutAddBackward& a) {
  using A = Acc<T>;
  using V = Vec<T>;
  const int64_t columns = a.columns;
  const Chunks chunks(a.rows);
  const auto process = [&](int64_t row, A* sums) {
    const int64_t start = row * columns;
    const T* dy = static_cast<const T*>(a.grad_output) + start;
    I* dx = a.grad_input != nullptr ? static_cast<I*>(a.grad_input) + start : nullptr;
    for_each_dropped<T, kDropout>(
        a.dropout, start, columns, [&](int64_t c, int64_t count, auto full, const auto& dropped) {
          const V value = dropped(load_vec(dy + c, count, full));
          if (dx != nullptr) store_vec(dx + c, value, count, full);
          if (sums != nullptr) {
            store_vec(sums + c, load_vec(sums + c, count, full) + value, count, full);
          }
        });
  };
  const int64_t bytes = columns * (sizeof(I) + sizeof(T));
  if (a.grad_bias == nullptr) {
    parallel_rows(a.rows, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) process(row, nullptr);
    });
    return;
  }
  auto* partials = static_cast<A*>(a.partials);
  parallel_rows(chunks.count, bytes * chunks.rows_per_chunk, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      A* sums = partials + chunk * columns;
      std::fill(sums, sums + columns, A(0));
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) process(row, sums);
    }
  });
  sum_partials(partials, chunks.count, columns, columns, static_cast<B*>(a.grad_bias));
}

// Calls f(I(), B(), T()) for the dtypes that the public function lets through.
template <typename F>
void switch_all(DType input, DType bias, DType dtype, const F& f) {
  switch_dtypes(input, dtype, [&](auto i, auto t) {
    using I = decltype(i);
    using T = decltype(t);
    if constexpr (std::is_same_v<I, T>) {
      f(i, t, t);
    } else if (is_half(bias)) {
      f(i, i, t);
    } else {
      f(i, t, t);
    }
  });
}

}  // namespace

void bias_dropout_add_forward(const BiasDropoutAddForward& a) {
  switch_all(a.input_dtype, a.bias_dtype, a.dtype, [&](auto i, auto b, auto t) {
    using I = decltype(i);
    using B = decltype(b);
    using T = decltype(t);
    a.dropout.active() ? forward<I, B, T, true>(a) : forward<I, B, T, false>(a);
  });
}

void bias_dropout_add_backward(const BiasDropoutAddBackward& a) {
  switch_all(a.input_dtype, a.bias_dtype, a.dtype, [&](auto i, auto b, auto t) {
    using I = decltype(i);
    using B = decltype(b);
    using T = decltype(t);
    a.dropout.active() ? backward<I, B, T, true>(a) : backward<I, B, T, false>(a);
  });
}

}  // namespace fusedops::CPU_CAPABILITY
