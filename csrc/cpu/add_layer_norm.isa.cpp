// add_layer_norm on the CPU: summed = residual + dropout(input), normed = layer_norm(summed), in
// one pass. What happens to a row of layer_norm is in norm_rows.h, the mask in dropout.h.
//
// Traffic of the forward: input and residual once, summed and normed once. The row is normalised
// from the rounded sum, which stands widened in L1. Backward: both gradients and summed once, the
// gradients of input and residual once; where those are equal, only one is written. Outputs that
// are larger than the cache are streamed around it.
#include "add_layer_norm.h"

#include <vector>

#include "../common/parallel.h"
#include "dropout.h"
#include "norm_rows.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// The vector rounded to T, in the accumulation dtype.
template <typename T>
inline Vec<T> rounded(const Vec<T>& vector) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return vector;
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    __m512 values;
    at::vec::cvtbf16_fp32(round_to_bf16(vector), values);
    return values;
#else
    T values[Vec<T>::size()];
    store_vec(values, vector);
    return load_vec(values);
#endif
  }
}

// I, T, P: dtypes of input, of residual and outputs, and of the parameters.
template <typename I, typename T, typename P, bool kDropout>
void forward(const AddLayerNormForward& a, bool stream) {
  using A = Acc<T>;
  using V = Vec<T>;
  const int64_t columns = a.columns;
  const int64_t bytes = columns * (sizeof(I) + 3 * sizeof(T));
  parallel_rows(a.rows, bytes, [&](int64_t begin, int64_t end) {
    const Widened<P> weight(a.weight, columns), bias(a.bias, columns);
    std::vector<A> row_memory(columns);
    A* wide = row_memory.data();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row * columns;
      const I* x = static_cast<const I*>(a.input) + start;
      const T* r = static_cast<const T*>(a.residual) + start;
      T* summed = static_cast<T*>(a.summed) + start;
      for_each_dropped<T, kDropout>(
          a.dropout, start, columns, [&](int64_t c, int64_t count, auto full, const auto& dropped) {
            const V added = dropped(load_vec(x + c, count, full));
            const V sum = rounded<T>(load_vec(r + c, count, full) + added);
            store_or_stream(stream, summed + c, sum, count, full);
            store_vec(wide + c, sum, count, full);
          });
      const A total = widen_and_sum(wide, wide, columns);
      const auto m = moments(wide, total, columns, static_cast<A>(a.eps));
      static_cast<A*>(a.mean)[row] = m.mean + m.correction;
      static_cast<A*>(a.rstd)[row] = m.rstd;
      T* normed = static_cast<T*>(a.normed) + start;
      normalize_row(stream, wide, m, weight.get(), bias.get(), normed, columns);
    }
  });
}

template <typename I, typename T, typename P, bool kDropout>
void backward(const AddLayerNormBackward& a, bool stream) {
  using V = Vec<T>;
  const int64_t columns = a.norm.columns;
  const auto finish = [&](int64_t row, const auto& dx_at) {
    const int64_t start = row * columns;
    const T* ds = a.grad_summed != nullptr ? static_cast<const T*>(a.grad_summed) + start : nullptr;
    I* dx = a.grad_input != nullptr ? static_cast<I*>(a.grad_input) + start : nullptr;
    T* dr = a.grad_residual != nullptr ? static_cast<T*>(a.grad_residual) + start : nullptr;
    for_each_dropped<T, kDropout>(a.dropout, start, columns,
                                  [&](int64_t c, int64_t count, auto full, const auto& dropped) {
                                    V total = dx_at(c, count, full);
                                    if (ds != nullptr)
                                      total = total + load_vec(ds + c, count, full);
                                    if (dr != nullptr)
                                      store_or_stream(stream, dr + c, total, count, full);
                                    if (dx != nullptr)
                                      store_or_stream(stream, dx + c, dropped(total), count, full);
                                  });
  };
  const bool wants_rows = a.grad_input != nullptr || a.grad_residual != nullptr;
  if (a.norm.grad_output != nullptr) {
    backward_all<T, P>(a.norm, wants_rows, finish);
  } else if (wants_rows) {
    parallel_rows(a.norm.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        finish(row, [](int64_t, int64_t, auto) { return V(Acc<T>(0)); });
      }
    });
  }
}

// Calls f(I(), T(), P()): I is T or bfloat16 beside float, P is T or float beside bfloat16.
template <typename F>
void switch_all(DType input, DType dtype, DType parameters, const F& f) {
  if (input == DType::bf16 && dtype == DType::f32) return f(c10::BFloat16(), float(), float());
  switch_dtypes(dtype, parameters, [&](auto t, auto p) { f(t, t, p); });
}

}  // namespace

void add_layer_norm_forward(const AddLayerNormForward& a) {
  switch_all(a.input_dtype, a.dtype, a.parameter_dtype, [&](auto i, auto t, auto p) {
    using I = decltype(i);
    using T = decltype(t);
    using P = decltype(p);
    // Two outputs of this size: together they fill the cache.
    const bool stream = should_stream(static_cast<const T*>(a.normed), 2 * a.rows, a.columns) &&
                        should_stream(static_cast<const T*>(a.summed), 2 * a.rows, a.columns);
    a.dropout.active() ? forward<I, T, P, true>(a, stream) : forward<I, T, P, false>(a, stream);
  });
}

void add_layer_norm_backward(const AddLayerNormBackward& a) {
  switch_all(a.input_dtype, a.norm.dtype, a.norm.parameter_dtype, [&](auto i, auto t, auto p) {
    using I = decltype(i);
    using T = decltype(t);
    using P = decltype(p);
    // A null pointer is aligned to anything.
    const bool stream =
        should_stream(static_cast<const I*>(a.grad_input), a.norm.rows, a.norm.columns) &&
        should_stream(static_cast<const T*>(a.grad_residual), a.norm.rows, a.norm.columns);
    if (a.dropout.active() && a.grad_input != nullptr) {
      backward<I, T, P, true>(a, stream);
    } else {
      backward<I, T, P, false>(a, stream);
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
