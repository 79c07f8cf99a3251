// bias_gelu on the CPU: y = act(x + bias), the sum and the activation in float32, rounded once.
//
// Forward traffic: x once, y once. Backward traffic: dy and x once, dx once, with
//   dx = dy * act'(x + bias),  dbias = sum over rows of dx (before its rounding).
// Rows are cut into chunks that do not depend on the thread count; each chunk adds its part of
// dbias into a partial row that stays in cache, and the partial rows are added in order. With few
// chunks the columns are cut as well, which changes no sum. One row at a time: rows of 4096 columns
// begin at the same place of L1, and several at once drive each other out.
#include "bias_gelu.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "gelu_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T, typename P, Activation kActivation>
void forward(const BiasGeluForward& a) {
  const bool stream = should_stream(static_cast<const T*>(a.output), a.rows, a.columns);
  using V = Vec<T>;
  const auto* bias = static_cast<const P*>(a.bias);
  const int64_t columns = a.columns;
  parallel_rows(a.rows, 2 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.input) + row * columns;
      T* y = static_cast<T*>(a.output) + row * columns;
      for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        const V sum = load_vec(x + c, count, full) + load_vec(bias + c, count, full);
        store_or_stream(stream, y + c, gelu_value<T, kActivation>(sum), count, full);
      });
    }
  });
}

// The columns [begin, end) of a row: dx when it is wanted, and their part of dbias.
template <typename T, typename P, Activation kActivation>
inline void backward_row(const BiasGeluBackward& a, bool stream, int64_t row, int64_t begin,
                         int64_t end, Acc<T>* dbias) {
  using V = Vec<T>;
  const int64_t offset = row * a.columns;
  const T* dy = static_cast<const T*>(a.grad_output) + offset;
  const T* x = static_cast<const T*>(a.input) + offset;
  T* dx = a.grad_input != nullptr ? static_cast<T*>(a.grad_input) + offset : nullptr;
  const P* bias = static_cast<const P*>(a.bias);
  const int64_t ahead = prefetch_distance<T>(a.columns);
  for_each_vector<V::size()>(end - begin, [&](int64_t column, int64_t count, auto full) {
    const int64_t c = begin + column;
    __builtin_prefetch(dy + c + ahead, 0, 2);
    __builtin_prefetch(x + c + ahead, 0, 2);
    const V shift = load_vec(bias + c, count, full);
    const V slope = gelu_slope<T, kActivation>(load_vec(x + c, count, full) + shift);
    const V grad = load_vec(dy + c, count, full) * slope;
    if (dx != nullptr) store_or_stream(stream, dx + c, grad, count, full);
    if (dbias != nullptr)
      store_vec(dbias + c, load_vec(dbias + c, count, full) + grad, count, full);
  });
}

template <typename T, typename P, Activation kActivation>
void backward(const BiasGeluBackward& a) {
  const bool stream = should_stream(static_cast<const T*>(a.grad_input), a.rows, a.columns);
  using A = Acc<T>;
  const Chunks chunks(a.rows);
  // Few chunks, that is at most 256 rows: cut the columns too, so that all threads have work.
  const int64_t wanted_blocks = (8 + chunks.count - 1) / chunks.count;
  const int64_t width = std::max<int64_t>(256, (a.columns / wanted_blocks + 63) / 64 * 64);
  const int64_t blocks = (a.columns + width - 1) / width;
  const int64_t rows_per_task = std::min(a.rows, chunks.rows_per_chunk);
  const int64_t bytes = 3 * sizeof(T) * rows_per_task * std::min(width, a.columns);
  auto* partials = static_cast<A*>(a.partials);
  parallel_rows(chunks.count * blocks, bytes, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t chunk = task / blocks;
      const int64_t begin = task % blocks * width;
      const int64_t end = std::min(a.columns, begin + width);
      A* dbias = partials != nullptr ? partials + chunk * a.columns : nullptr;
      if (dbias != nullptr) std::fill(dbias + begin, dbias + end, A(0));
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) {
        backward_row<T, P, kActivation>(a, stream, row, begin, end, dbias);
      }
    }
  });
  if (a.grad_bias != nullptr) {
    sum_partials(partials, chunks.count, a.columns, a.columns, static_cast<P*>(a.grad_bias));
  }
}

}  // namespace

void bias_gelu_forward(const BiasGeluForward& a) {
  switch_dtypes(a.dtype, a.bias_dtype, [&](auto t, auto p) {
    with_gelu(a.activation,
              [&](auto activation) { forward<decltype(t), decltype(p), activation.value>(a); });
  });
}

void bias_gelu_backward(const BiasGeluBackward& a) {
  switch_dtypes(a.dtype, a.bias_dtype, [&](auto t, auto p) {
    with_gelu(a.activation,
              [&](auto activation) { backward<decltype(t), decltype(p), activation.value>(a); });
  });
}

}  // namespace fusedops::CPU_CAPABILITY
