// gated_rms_norm on the CPU: groups of a row are divided by their root mean square, scaled, and
// multiplied by act(gate) before or after that. The sum of squares is that of norm_rows.h.
//
// Traffic: the forward reads input and gate once and writes the output; the backward reads the
// gradient, input and gate and writes the gradients of both. What the second loop over a group
// needs from the first stays in L1. With u = x * act(g) in place of x where the gate comes first,
// xhat = u * rstd and h the gradient of xhat:
//   du = rstd * (h - xhat * mean(h * xhat)),  dweight = sum over rows of the gradient times xhat
//
// Rows of the backward are cut into chunks that do not depend on the thread count; each adds its
// part of the weight's gradient into a partial row, and the partial rows are added in order.
#include "gated_rms_norm.h"

#include "../../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vec.h"
#include "../elementwise/gelu_vec.h"
#include "norm_rows.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// act(g) and its derivative.
template <typename T, bool kSilu>
inline Vec<T> gate_value(const Vec<T>& g) {
  if constexpr (kSilu) {
    return gelu_value<T, Activation::silu>(g);
  } else if constexpr (std::is_same_v<T, double>) {
    return Vec<T>(1) / (Vec<T>(1) + g.neg().exp());
  } else {
    return sigmoid_from(exp_of_product(g.abs(), -1.0f), g).value;
  }
}

template <typename T, bool kSilu>
inline Vec<T> gate_slope(const Vec<T>& g) {
  if constexpr (kSilu) {
    return gelu_slope<T, Activation::silu>(g);
  } else if constexpr (std::is_same_v<T, double>) {
    const Vec<T> t = g.abs().neg().exp();
    const Vec<T> large = Vec<T>(1) / (Vec<T>(1) + t);
    return t * large * large;
  } else {
    return sigmoid_from(exp_of_product(g.abs(), -1.0f), g).slope;
  }
}

template <typename T>
inline const T* at_row(const GatedRows& rows, int64_t row, int64_t column) {
  return static_cast<const T*>(rows.data) + row * rows.stride + column;
}

template <typename T, bool kNormFirst, bool kSilu>
void forward(const GatedNormForward& a) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t columns = a.groups * a.size;
  const bool stream = should_stream(static_cast<const T*>(a.output), a.rows * a.groups, a.size);
  parallel_rows(a.rows, 3 * columns * sizeof(T), [&](int64_t begin, int64_t end) {
    const Parameter<A> parameter(a.weight, a.weight_dtype, columns, A(0), A(1));
    Scratch<A> gated(kNormFirst ? 0 : a.size);
    for (int64_t group = begin * a.groups; group < end * a.groups; ++group) {
      const int64_t row = group / a.groups, first = group % a.groups * a.size;
      const T* x = at_row<T>(a.input, row, first);
      const T* g = at_row<T>(a.gate, row, first);
      const A* weight = parameter.get() + first;
      T* y = static_cast<T*>(a.output) + row * columns + first;
      A squares;
      if constexpr (kNormFirst) {
        squares = sum_squares(x, a.size, Nothing());
      } else {
        for_each_vector<W>(a.size, [&](int64_t c, int64_t count, auto full) {
          const V value = gate_value<T, kSilu>(load_vec(g + c, count, full));
          store_vec(gated.data() + c, load_vec(x + c, count, full) * value, count, full);
        });
        squares = sum_squares(gated.data(), a.size, Nothing());
      }
      const A rstd = mean_square_moments(squares, a.size, static_cast<A>(a.eps)).rstd;
      static_cast<A*>(a.rstd)[group] = rstd;
      for_each_vector<W>(a.size, [&](int64_t c, int64_t count, auto full) {
        const V scale = load_vec(weight + c, count, full);
        V value;
        if constexpr (kNormFirst) {
          value = load_vec(x + c, count, full) * V(rstd) * scale;
          value = value * gate_value<T, kSilu>(load_vec(g + c, count, full));
        } else {
          value = load_vec(gated.data() + c, count, full) * V(rstd) * scale;
        }
        store_or_stream(stream, y + c, value, count, full);
      });
    }
  });
}

// One group: adds its part of the weight's gradient to `dweight`, and writes the other gradients.
// `kept` has room for two rows of the group.
template <typename T, bool kNormFirst, bool kSilu>
void backward_group(const GatedNormBackward& a, bool stream, int64_t row, int64_t first,
                    Acc<T> rstd, const Acc<T>* weight, Acc<T>* dweight, Acc<T>* kept) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const int64_t start = row * a.groups * a.size + first;
  const T* dy = at_row<T>(a.grad_output, row, first);
  const T* x = at_row<T>(a.input, row, first);
  const T* g = at_row<T>(a.gate, row, first);
  T* dx = a.grad_input != nullptr ? static_cast<T*>(a.grad_input) + start : nullptr;
  T* dgate = a.grad_gate != nullptr ? static_cast<T*>(a.grad_gate) + start : nullptr;
  A* values = kept;
  A* slopes = kept + a.size;
  V sum(A(0));
  for_each_vector<W>(a.size, [&](int64_t c, int64_t count, auto full) {
    const V grad = load_vec(dy + c, count, full), gate = load_vec(g + c, count, full);
    const V scale = load_vec(weight + c, count, full);
    const V value = gate_value<T, kSilu>(gate), slope = gate_slope<T, kSilu>(gate);
    V xhat = load_vec(x + c, count, full) * V(rstd);
    V of_norm = grad * value;
    if constexpr (!kNormFirst) {
      xhat = load_vec(x + c, count, full) * value * V(rstd);
      of_norm = grad;
      store_vec(values + c, value, count, full);
      store_vec(slopes + c, slope, count, full);
    } else {
      store_vec(values + c, of_norm * scale, count, full);
      if (dgate != nullptr) {
        store_or_stream(stream, dgate + c, grad * xhat * scale * slope, count, full);
      }
    }
    store_vec(dweight + c, at::vec::fmadd(of_norm, xhat, load_vec(dweight + c, count, full)), count,
              full);
    sum = at::vec::fmadd(of_norm * scale, xhat, sum);
  });
  if (dx == nullptr && (kNormFirst || dgate == nullptr)) return;
  const V along(-sum_lanes(sum) / static_cast<A>(a.size) * rstd);
  for_each_vector<W>(a.size, [&](int64_t c, int64_t count, auto full) {
    const V in = load_vec(x + c, count, full), value = load_vec(values + c, count, full);
    if constexpr (kNormFirst) {
      const V grad = at::vec::fmadd(in * V(rstd), along, value * V(rstd));
      store_or_stream(stream, dx + c, grad, count, full);
    } else {
      const V h = load_vec(dy + c, count, full) * load_vec(weight + c, count, full);
      const V grad = at::vec::fmadd(in * value * V(rstd), along, h * V(rstd));
      if (dx != nullptr) store_or_stream(stream, dx + c, grad * value, count, full);
      if (dgate != nullptr) {
        const V slope = load_vec(slopes + c, count, full);
        store_or_stream(stream, dgate + c, grad * in * slope, count, full);
      }
    }
  });
}

template <typename T, bool kNormFirst, bool kSilu>
void backward(const GatedNormBackward& a) {
  using A = Acc<T>;
  const int64_t columns = a.groups * a.size;
  const bool stream =
      should_stream(static_cast<const T*>(a.grad_input), a.rows * a.groups, a.size) &&
      should_stream(static_cast<const T*>(a.grad_gate), a.rows * a.groups, a.size);
  const Chunks chunks(a.rows);
  const int64_t bytes_per_chunk = 5 * columns * sizeof(T) * chunks.rows_per_chunk;
  parallel_rows(chunks.count, bytes_per_chunk, [&](int64_t begin, int64_t end) {
    const Parameter<A> weight(a.weight, a.weight_dtype, columns, A(0), A(1));
    Scratch<A> unwanted(a.partials == nullptr ? columns : 0), kept(2 * a.size);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* dweight =
          a.partials == nullptr ? unwanted.data() : static_cast<A*>(a.partials) + chunk * columns;
      std::fill(dweight, dweight + columns, A(0));
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) {
        for (int64_t group = 0; group < a.groups; ++group) {
          const A rstd = static_cast<const A*>(a.rstd)[row * a.groups + group];
          const int64_t first = group * a.size;
          backward_group<T, kNormFirst, kSilu>(a, stream, row, first, rstd, weight.get() + first,
                                               dweight + first, kept.data());
        }
      }
    }
  });
  if (a.grad_weight == nullptr) return;
  const auto* partials = static_cast<const A*>(a.partials);
  switch_dtypes(a.dtype, a.weight_dtype, [&](auto, auto parameter) {
    using P = decltype(parameter);
    if constexpr (std::is_same_v<Acc<P>, A>) {
      sum_partials(partials, chunks.count, columns, columns, static_cast<P*>(a.grad_weight));
    }
  });
}

// Calls run(T(), norm before gate, silu), the last two as std::bool_constant.
template <typename Arguments, typename Run>
void with_forms(const Arguments& a, const Run& run) {
  const auto with = [](bool flag, const auto& body) {
    flag ? body(std::true_type()) : body(std::false_type());
  };
  switch_dtype(a.dtype, [&](auto t) {
    with(a.norm_before_gate,
         [&](auto first) { with(a.is_silu, [&](auto silu) { run(t, first, silu); }); });
  });
}

}  // namespace

void gated_norm_forward(const GatedNormForward& a) {
  with_forms(a, [&](auto t, auto first, auto silu) { forward<decltype(t), first, silu>(a); });
}

void gated_norm_backward(const GatedNormBackward& a) {
  with_forms(a, [&](auto t, auto first, auto silu) { backward<decltype(t), first, silu>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
