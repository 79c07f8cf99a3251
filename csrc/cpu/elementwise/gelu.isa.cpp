// gelu on the CPU: y = x * Phi(x), its tanh form, or x * sigmoid(1.702 x).
//
// One pass over memory each way: the forward reads x and writes y, the backward reads dy and x and
// writes dx = dy * act'(x). Outputs larger than the cache are streamed around it.
#include "gelu.h"

#include "elementwise.h"
#include "gelu_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T, Activation kActivation>
void forward(const GeluForward& a) {
  const bool stream = streams_blocks<T>(a.output, 1, a.count);
  using V = Vec<T>;
  parallel_blocks(1, a.count, 2 * sizeof(T), [&](int64_t, int64_t first, int64_t count) {
    const T* x = static_cast<const T*>(a.input) + first;
    T* y = static_cast<T*>(a.output) + first;
    for_each_vector<V::size()>(count, [&](int64_t i, int64_t lanes, auto full) {
      store_or_stream(stream, y + i, gelu_value<T, kActivation>(load_vec(x + i, lanes, full)),
                      lanes, full);
    });
  });
}

template <typename T, Activation kActivation>
void backward(const GeluBackward& a) {
  const bool stream = streams_blocks<T>(a.grad_input, 1, a.count);
  using V = Vec<T>;
  parallel_blocks(1, a.count, 3 * sizeof(T), [&](int64_t, int64_t first, int64_t count) {
    const T* dy = static_cast<const T*>(a.grad_output) + first;
    const T* x = static_cast<const T*>(a.input) + first;
    T* dx = static_cast<T*>(a.grad_input) + first;
    for_each_vector<V::size()>(count, [&](int64_t i, int64_t lanes, auto full) {
      const V slope = gelu_slope<T, kActivation>(load_vec(x + i, lanes, full));
      store_or_stream(stream, dx + i, load_vec(dy + i, lanes, full) * slope, lanes, full);
    });
  });
}

}  // namespace

void gelu_forward(const GeluForward& a) {
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    with_gelu(a.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      forward<T, kActivation>(a);
    });
  });
}

void gelu_backward(const GeluBackward& a) {
  switch_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    with_gelu(a.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      backward<T, kActivation>(a);
    });
  });
}

}  // namespace fusedops::CPU_CAPABILITY
