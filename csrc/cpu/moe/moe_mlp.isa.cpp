// Epilogues of moe_mlp (interface: moe_mlp.h). The products of all experts are one batch
// (gemm.isa.cpp), whose rows are gathered while they are packed.
//
// Forward: bias, activation, gate and probability are done on tiles of sums in L1; of the first
// product only what the second one reads is written. Backward: so are the gradient of the
// pre-activation, the hidden layer that the second weight's gradient needs, and the parts of the
// probability's gradient: one per tile, added in order.
#include "moe_mlp.h"

#include <algorithm>
#include <vector>

#include "../../common/parallel.h"
#include "../gemm/epilogue.h"
#include "../gemm/gemm_kernel.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr double kGateLimit = 7.0;

template <typename T>
struct Pair {
  Vec<T> gate;
  Vec<T> up;
};

// `count` elements of vector `index` (0, 1) of a pair that holds `count` lanes.
template <typename T>
inline int64_t part(int64_t count, int index) {
  const int64_t size = Vec<T>::size();
  return std::clamp<int64_t>(2 * count - index * size, 0, size);
}

// The gate and up of columns [c, c + count) of a row that holds them side by side.
template <typename T, typename From, typename Full>
inline Pair<T> load_pairs(const From* row, int64_t c, int64_t count, Full full) {
  const auto* from = row + 2 * c;
  const auto [gate, up] =
      at::vec::deinterleave2(load_vec(from, part<T>(count, 0), full),
                             load_vec(from + Vec<T>::size(), part<T>(count, 1), full));
  return {gate, up};
}

template <typename T, typename Full>
inline void store_pairs(T* row, int64_t c, const Pair<T>& pair, int64_t count, Full full) {
  const auto [first, second] = at::vec::interleave2(pair.gate, pair.up);
  store_vec(row + 2 * c, first, part<T>(count, 0), full);
  store_vec(row + 2 * c + Vec<T>::size(), second, part<T>(count, 1), full);
}

template <typename T, typename Full>
inline Pair<T> load_pair(const T* row, GateLayout layout, int64_t columns, int64_t c, int64_t count,
                         Full full) {
  if (layout == GateLayout::pairs) return load_pairs<T>(row, c, count, full);
  const auto gate = load_vec(row + c, count, full);
  return {gate, layout == GateLayout::halves ? load_vec(row + columns + c, count, full) : gate};
}

template <typename T, typename Full>
inline void store_pair(T* row, GateLayout layout, int64_t columns, int64_t c, const Pair<T>& pair,
                       int64_t count, Full full) {
  if (layout == GateLayout::pairs) return store_pairs<T>(row, c, pair, count, full);
  store_vec(row + c, pair.gate, count, full);
  if (layout == GateLayout::halves) store_vec(row + columns + c, pair.up, count, full);
}

template <typename T, Activation A>
inline Vec<T> gated_value(const Gate& gate, const Pair<T>& z) {
  using V = Vec<T>;
  using S = Acc<T>;
  if (gate.layout == GateLayout::none) return activated<T, A>(z.gate);
  if (!gate.clamped) return activated<T, A>(z.gate) * z.up;
  const V limit(static_cast<S>(kGateLimit));
  const V up = at::vec::clamp(z.up, V(static_cast<S>(-kGateLimit)), limit);
  return activated<T, A>(at::vec::clamp_max(z.gate, limit)) * (up + V(S(1)));
}

// The value, and from the gradient d of it those of gate and up.
template <typename T, Activation A>
inline Vec<T> gated_gradient(const Gate& gate, const Pair<T>& z, const Vec<T>& d, Pair<T>& grad) {
  using V = Vec<T>;
  using S = Acc<T>;
  if (gate.layout == GateLayout::none) {
    grad.gate = with_slope<A>(d, slope<T, A>(z.gate), z.gate);
    return activated<T, A>(z.gate);
  }
  if (!gate.clamped) {
    const V value = activated<T, A>(z.gate);
    grad = {with_slope<A>(d, slope<T, A>(z.gate) * z.up, z.gate), d * value};
    return value * z.up;
  }
  const V limit(static_cast<S>(kGateLimit)), least(static_cast<S>(-kGateLimit)), zero(S(0));
  // As the gradient of torch's clamp: 0 of what was bounded, and of NaN.
  const V inner = at::vec::clamp_max(z.gate, limit);
  const V factor = at::vec::clamp(z.up, least, limit) + V(S(1));
  const V value = activated<T, A>(inner);
  grad.gate = V::blendv(zero, d * (slope<T, A>(inner) * factor), z.gate <= limit);
  grad.up = V::blendv(zero, d * value, z.up.abs() <= limit);
  return value * factor;
}

template <typename T, Activation A>
void store_expert(const void* context, const Tile& tile) {
  using V = Vec<T>;
  using S = Acc<T>;
  const auto& a = *static_cast<const ExpertForward*>(context);
  const auto layout = a.gate.layout;
  const int64_t width = layout == GateLayout::none ? a.columns : 2 * a.columns;
  const int64_t share = layout == GateLayout::pairs ? 2 : 1;
  const int64_t column = tile.column / share, columns = tile.columns / share;
  const T* bias = at<T>(a.bias, 0, 0, tile.column);
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i;
    const auto* sums = static_cast<const S*>(tile.sums) + i * tile.stride;
    const auto* ups = layout == GateLayout::halves
                          ? static_cast<const S*>(tile.second) + i * tile.stride
                          : nullptr;
    T* kept = at<T>(a.preactivation, row, width, tile.column);
    T* hidden = at<T>(a.hidden, row, a.columns, column);
    const V scale(static_cast<const S*>(a.scale)[row]);
    for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
      Pair<T> z;
      if (layout == GateLayout::pairs) {
        z = load_pairs<T>(sums, c, count, full);
      } else {
        z.gate = load_vec(sums + c, count, full);
        z.up = ups == nullptr ? z.gate : load_vec(ups + c, count, full);
      }
      if (bias != nullptr) {
        const Pair<T> added = load_pair<T>(bias, layout, a.columns, c, count, full);
        z = {z.gate + added.gate, z.up + added.up};
      }
      if (kept != nullptr) store_pair<T>(kept, layout, a.columns, c, z, count, full);
      store_vec(hidden + c, gated_value<T, A>(a.gate, z) * scale, count, full);
    });
  }
}

template <typename T, Activation A>
void store_expert_gradient(const void* context, const Tile& tile) {
  using V = Vec<T>;
  using S = Acc<T>;
  const auto& a = *static_cast<const ExpertBackward*>(context);
  const int64_t n = a.product.n;
  const auto layout = a.gate.layout;
  const int64_t width = layout == GateLayout::none ? n : 2 * n;
  const int64_t place = layout == GateLayout::pairs ? 2 * tile.column : tile.column;
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i;
    const auto* sums = static_cast<const S*>(tile.sums) + i * tile.stride;
    const T* kept = at<T>(a.preactivation, row, width, place);
    T* grad = at<T>(a.grad_preactivation, row, width, place);
    T* hidden = at<T>(a.hidden, row, n, tile.column);
    const V scale(static_cast<const S*>(a.scale)[row]);
    V dot(S(0));
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      const V d = load_vec(sums + c, count, full);
      const Pair<T> z = load_pair<T>(kept, layout, n, c, count, full);
      Pair<T> grads;
      const V value = gated_gradient<T, A>(a.gate, z, d * scale, grads);
      if (hidden != nullptr) store_vec(hidden + c, value * scale, count, full);
      if (grad != nullptr) store_pair<T>(grad, layout, n, c, grads, count, full);
      if (a.dots != nullptr) dot = at::vec::fmadd(d, value, dot);  // past the end d is 0
    });
    if (a.dots != nullptr) {
      static_cast<S*>(a.dots)[row * a.dots_stride + tile.column / kTileColumns<S>] = sum_lanes(dot);
    }
  }
}

template <typename T>
void sum_slots(const SlotGradients& a) {
  using V = Vec<T>;
  using S = Acc<T>;
  const int64_t parts = (a.product_columns + kTileColumns<S> - 1) / kTileColumns<S>;
  const int64_t real = a.groups == 0 ? 0 : a.ends[a.groups - 1];
  const int64_t bytes = parts * static_cast<int64_t>(sizeof(S)) +
                        (a.bias == nullptr ? 0 : 2 * a.size * static_cast<int64_t>(sizeof(T)));
  auto* grad = static_cast<S*>(a.grad);
  parallel_rows(a.rows, bytes, [&](int64_t begin, int64_t end) {
    int64_t group = std::upper_bound(a.ends, a.ends + a.groups, begin) - a.ends;
    for (int64_t row = begin; row < end; ++row) {
      S sum = 0;
      if (row < real) {
        while (a.ends[group] <= row) ++group;
        const S* dots = static_cast<const S*>(a.dots) + row * a.dots_stride;
        for (int64_t i = 0; i < parts; ++i) sum += dots[i];
        if (a.bias != nullptr) {
          const T* bias = at<T>(a.bias, group, a.size, 0);
          const T* dy = at<T>(a.grad_output, a.tokens[row], a.size, 0);
          V dot(S(0));
          for_each_vector<V::size()>(a.size, [&](int64_t c, int64_t count, auto full) {
            dot =
                at::vec::fmadd(load_vec(bias + c, count, full), load_vec(dy + c, count, full), dot);
          });
          sum += sum_lanes(dot);
        }
      }
      grad[a.permutation[row]] = sum;
    }
  });
}

template <typename Expert, typename Store>
void run_experts(const Expert* experts, int64_t count, const Store& store) {
  if (count == 0) return;
  std::vector<GemmCall> calls;
  const Expert& first = experts[0];
  with_types(first.product.dtype, first.gate.activation, [&](auto t, auto tag) {
    for (int64_t i = 0; i < count; ++i) {
      GemmCall call = experts[i].product;
      call.context = experts + i;
      call.store = store(t, tag);
      if constexpr (std::is_same_v<Expert, ExpertForward>) {
        if (first.gate.layout == GateLayout::halves) call.second_b = &experts[i].up;
      }
      calls.push_back(call);
    }
  });
  gemm_batch(calls.data(), count);
}

}  // namespace

void expert_forward(const ExpertForward* experts, int64_t count) {
  run_experts(experts, count,
              [](auto t, auto tag) { return store_expert<decltype(t), decltype(tag)::value>; });
}

void expert_backward(const ExpertBackward* experts, int64_t count) {
  run_experts(experts, count, [](auto t, auto tag) {
    return store_expert_gradient<decltype(t), decltype(tag)::value>;
  });
}

void slot_gradients(const SlotGradients& a) {
  switch_dtype(a.dtype, [&](auto t) { sum_slots<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
