// gelu on the CPU: y = x * Phi(x), its tanh form, or x * sigmoid(1.702 x).
//
// One pass over memory each way: the forward reads x and writes y, the backward reads dy and x and
// writes dx = dy * act'(x). Outputs larger than the cache are streamed around it.
#include "gelu.h"

#include "elementwise.h"
#include "gelu_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T, Activation kActivation, bool kBackward>
void run(const Gelu& a) {
  constexpr int64_t kTensors = kBackward ? 3 : 2;
  const bool stream = streams_blocks<T>(a.output, 1, a.count);
  using V = Vec<T>;
  parallel_blocks(1, a.count, kTensors * sizeof(T), [&](int64_t, int64_t first, int64_t count) {
    const T* dy = kBackward ? static_cast<const T*>(a.grad_output) + first : nullptr;
    const T* x = static_cast<const T*>(a.input) + first;
    T* y = static_cast<T*>(a.output) + first;
    for_each_vector<V::size()>(count, [&](int64_t i, int64_t lanes, auto full) {
      V result = load_vec(x + i, lanes, full);
      if constexpr (kBackward) {
        result = load_vec(dy + i, lanes, full) * gelu_slope<T, kActivation>(result);
      } else {
        result = gelu_value<T, kActivation>(result);
      }
      store_or_stream(stream, y + i, result, lanes, full);
    });
  });
}

}  // namespace

void gelu(const Gelu& a) {
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    with_gelu(a.activation, [&](auto activation) {
      a.grad_output == nullptr ? run<T, activation.value, false>(a)
                               : run<T, activation.value, true>(a);
    });
  });
}

}  // namespace fusedops::CPU_CAPABILITY
