// Epilogue of linear_glu, and the pass over its gradient (interface: linear_glu.h).
//
// Forward: gemm.isa.cpp makes the tiles of both products for the same rows and columns and leaves
// them in L1 (the input is packed once for both); activation and product are done there. Beyond the
// output only the two pre-activations are written, once, when they are kept.
//
// Backward: one pass reads grad_output and the pre-activations and writes their two gradients,
// which the matrix products then read. Where grad_output is itself a product (mlp_tiled), the same
// is done on its tiles.
#include "linear_glu.h"

#include "../elementwise/elementwise.h"
#include "../gemm/epilogue.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Puts gate and up within their bounds.
template <typename V>
inline void bound(V& gate, V& up, const V& limit, const V& least) {
  gate = at::vec::clamp_max(gate, limit);
  up = at::vec::clamp(up, least, limit);
}

template <typename T, Activation A>
void store_glu(const void* context, const Tile& tile) {
  using V = Vec<T>;
  const auto& a = *static_cast<const LinearGluForward*>(context);
  const int64_t n = a.product.n;
  const bool bounded = a.limit > 0;
  const V limit(static_cast<Acc<T>>(a.limit)), least(static_cast<Acc<T>>(-a.limit));
  for (int i = 0; i < tile.rows; ++i) {
    const auto* gates = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    const auto* ups = static_cast<const Acc<T>*>(tile.second) + i * tile.stride;
    T* gate = at<T>(a.gate, tile.row + i, n, tile.column);
    T* up = at<T>(a.up, tile.row + i, n, tile.column);
    T* output = at<T>(a.output, tile.row + i, n, tile.column);
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      V g = load_vec(gates + c, count, full), u = load_vec(ups + c, count, full);
      if (gate != nullptr) store_vec(gate + c, g, count, full);
      if (up != nullptr) store_vec(up + c, u, count, full);
      if (bounded) bound(g, u, limit, least);
      if (output != nullptr) store_vec(output + c, activated<T, A>(g) * u, count, full);
    });
  }
}

template <typename T, Activation A>
void store_hidden_gradient(const void* context, const Tile& tile) {
  using V = Vec<T>;
  const auto& a = *static_cast<const GluHiddenGradient*>(context);
  const int64_t n = a.product.n;
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    T* gate = at<T>(a.gate, tile.row + i, n, tile.column);
    T* up = at<T>(a.up, tile.row + i, n, tile.column);
    T* hidden = at<T>(a.hidden, tile.row + i, n, tile.column);
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      const V d = load_vec(sums + c, count, full), g = load_vec(gate + c, count, full);
      const V u = load_vec(up + c, count, full), value = activated<T, A>(g);
      store_vec(gate + c, with_slope<A>(d * u, slope<T, A>(g), g), count, full);
      store_vec(up + c, d * value, count, full);
      if (hidden != nullptr) store_vec(hidden + c, value * u, count, full);
    });
  }
}

template <typename T, Activation A>
void gradient(const GluGradient& a) {
  using V = Vec<T>;
  // Both gradients are written: together they push more out of the cache than each alone.
  const auto streams = [&](const void* to) { return streams_blocks<T>(to, 1, 2 * a.numel); };
  const bool stream = (a.grad_gate == nullptr || streams(a.grad_gate)) &&
                      (a.grad_up == nullptr || streams(a.grad_up));
  const bool bounded = a.limit > 0;
  const V limit(static_cast<Acc<T>>(a.limit)), least(static_cast<Acc<T>>(-a.limit)),
      zero(Acc<T>(0));
  parallel_blocks(1, a.numel, 5 * sizeof(T), [&](int64_t, int64_t first, int64_t size) {
    const T* dy = at<T>(a.grad_output, 0, 0, first);
    const T* gate = at<T>(a.gate, 0, 0, first);
    const T* up = at<T>(a.up, 0, 0, first);
    T* dgate = at<T>(a.grad_gate, 0, 0, first);
    T* dup = at<T>(a.grad_up, 0, 0, first);
    for_each_vector<V::size()>(size, [&](int64_t i, int64_t count, auto full) {
      V g = load_vec(gate + i, count, full), u = load_vec(up + i, count, full);
      const V d = load_vec(dy + i, count, full), z = g, factor = u;
      if (bounded) bound(g, u, limit, least);
      if (dgate != nullptr) {
        V grad = with_slope<A>(d * u, slope<T, A>(g), g);
        // As the gradient of torch's clamp: 0 of what was bounded, and of NaN.
        if (bounded) grad = V::blendv(zero, grad, z <= limit);
        store_or_stream(stream, dgate + i, grad, count, full);
      }
      if (dup != nullptr) {
        V grad = d * activated<T, A>(g);
        if (bounded) grad = V::blendv(zero, grad, factor.abs() <= limit);
        store_or_stream(stream, dup + i, grad, count, full);
      }
    });
  });
}

}  // namespace

void linear_glu_forward(const LinearGluForward& a) {
  GemmCall product = a.product;
  product.context = &a;
  with_types(product.dtype, a.activation, [&](auto t, auto tag) {
    product.store = store_glu<decltype(t), decltype(tag)::value>;
  });
  gemm(product);
}

void glu_hidden_gradient(const GluHiddenGradient& a) {
  GemmCall product = a.product;
  product.context = &a;
  product.touched[0] = {a.gate, product.n};
  product.touched[1] = {a.up, product.n};
  product.touched[2] = {a.hidden, product.n};
  with_types(product.dtype, a.activation, [&](auto t, auto tag) {
    product.store = store_hidden_gradient<decltype(t), decltype(tag)::value>;
  });
  gemm(product);
}

void glu_gradient(const GluGradient& a) {
  with_types(a.dtype, a.activation,
             [&](auto t, auto tag) { gradient<decltype(t), decltype(tag)::value>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
