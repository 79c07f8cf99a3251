// layer_norm on the CPU. What happens to a row is in norm_rows.h.
//
// Traffic of the forward: input once, output once; of the backward: input and gradient once, dx
// once. Outputs that are larger than the cache are streamed around it.
#include "layer_norm.h"

#include <vector>

#include "../common/parallel.h"
#include "norm_rows.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T, typename P>
void forward(const LayerNormForward& a) {
  const bool stream = should_stream(static_cast<const T*>(a.output), a.rows, a.columns);
  using A = Acc<T>;
  const int64_t columns = a.columns;
  parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    const Widened<P> weight(a.weight, columns), bias(a.bias, columns);
    std::vector<A> wide(columns);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.input) + row * columns;
      T* y = static_cast<T*>(a.output) + row * columns;
      const A total = widen_and_sum(x, wide.data(), columns);
      const auto m = moments(wide.data(), total, columns, static_cast<A>(a.eps));
      static_cast<A*>(a.mean)[row] = m.mean + m.correction;
      static_cast<A*>(a.rstd)[row] = m.rstd;
      normalize_row(stream, wide.data(), m, weight.get(), bias.get(), y, columns);
    }
  });
}

template <typename T, typename P>
void backward(const LayerNormBackward& a) {
  const bool stream = should_stream(static_cast<const T*>(a.grad_input), a.rows, a.columns);
  const auto finish = [&](int64_t row, const auto& dx_at) {
    T* dx = static_cast<T*>(a.grad_input) + row * a.columns;
    for_each_vector<Vec<T>::size()>(a.columns, [&](int64_t c, int64_t count, auto full) {
      store_or_stream(stream, dx + c, dx_at(c, count, full), count, full);
    });
  };
  backward_all<T, P>(a, a.grad_input != nullptr, finish);
}

}  // namespace

void layer_norm_forward(const LayerNormForward& a) {
  switch_dtypes(a.dtype, a.parameter_dtype,
                [&](auto t, auto p) { forward<decltype(t), decltype(p)>(a); });
}

void layer_norm_backward(const LayerNormBackward& a) {
  switch_dtypes(a.dtype, a.parameter_dtype,
                [&](auto t, auto p) { backward<decltype(t), decltype(p)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
