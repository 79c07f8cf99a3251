// swiglu and geglu on the CPU: y = act(gate) * up.
//
// One pass over memory each way: the forward reads gate and up and writes y, the backward reads dy,
// gate and up and writes dgate = dy * up * act'(gate) and dup = dy * act(gate). Rows of the inputs
// may be apart (gate and up as the halves of one tensor); dense tensors come as one long row.
// Outputs larger than the cache are streamed around it.
#include "glu.h"

#include "elementwise.h"
#include "gelu_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T>
inline const T* at_row(const GluRows& rows, int64_t row, int64_t column) {
  return static_cast<const T*>(rows.data) + row * rows.stride + column;
}

template <typename T, Activation kActivation>
void forward(const GluForward& a) {
  using V = Vec<T>;
  const bool stream = streams_blocks<T>(a.output, a.rows, a.columns);
  parallel_blocks(a.rows, a.columns, 3 * sizeof(T), [&](int64_t row, int64_t first, int64_t size) {
    const T* gate = at_row<T>(a.gate, row, first);
    const T* up = at_row<T>(a.up, row, first);
    T* y = static_cast<T*>(a.output) + row * a.columns + first;
    for_each_vector<V::size()>(size, [&](int64_t c, int64_t count, auto full) {
      const V value = gelu_value<T, kActivation>(load_vec(gate + c, count, full));
      store_or_stream(stream, y + c, value * load_vec(up + c, count, full), count, full);
    });
  });
}

template <typename T, Activation kActivation>
void backward(const GluBackward& a) {
  using V = Vec<T>;
  const bool stream_gate = streams_blocks<T>(a.grad_gate, a.rows, a.columns);
  const bool stream_up = streams_blocks<T>(a.grad_up, a.rows, a.columns);
  parallel_blocks(a.rows, a.columns, 5 * sizeof(T), [&](int64_t row, int64_t first, int64_t size) {
    const T* dy = at_row<T>(a.grad_output, row, first);
    const T* gate = at_row<T>(a.gate, row, first);
    const T* up = at_row<T>(a.up, row, first);
    const int64_t offset = row * a.columns + first;
    T* dgate = a.grad_gate != nullptr ? static_cast<T*>(a.grad_gate) + offset : nullptr;
    T* dup = a.grad_up != nullptr ? static_cast<T*>(a.grad_up) + offset : nullptr;
    for_each_vector<V::size()>(size, [&](int64_t c, int64_t count, auto full) {
      const V x = load_vec(gate + c, count, full);
      const V grad = load_vec(dy + c, count, full);
      if (dgate != nullptr) {
        const V slope = gelu_slope<T, kActivation>(x);
        store_or_stream(stream_gate, dgate + c, grad * load_vec(up + c, count, full) * slope, count,
                        full);
      }
      if (dup != nullptr) {
        store_or_stream(stream_up, dup + c, grad * gelu_value<T, kActivation>(x), count, full);
      }
    });
  });
}

// Calls body(T(), std::integral_constant<Activation, A>{}) for silu or the variant of GELU.
template <typename F>
inline void with_types(DType dtype, Activation activation, const F& body) {
  switch_dtype(dtype, [&](auto t) {
    if (activation == Activation::silu) {
      body(t, std::integral_constant<Activation, Activation::silu>{});
    } else {
      with_gelu(activation, [&](auto variant) { body(t, variant); });
    }
  });
}

}  // namespace

void glu_forward(const GluForward& a) {
  with_types(a.dtype, a.activation,
             [&](auto t, auto activation) { forward<decltype(t), activation.value>(a); });
}

void glu_backward(const GluBackward& a) {
  with_types(a.dtype, a.activation,
             [&](auto t, auto activation) { backward<decltype(t), activation.value>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
