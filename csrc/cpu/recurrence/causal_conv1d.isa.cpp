// causal_conv1d on the CPU: y[t] = act(bias + sum over k of w[k] * x[t - width + 1 + k]), per
// channel. Sums in float32, rounded once.
//
// Rows of tokens are cut into chunks and into blocks of channels. Of a chunk one vector of channels
// goes through all tokens with its weights and its last inputs in registers, then the next vector.
// A chunk has few tokens, so that the lines of memory that one vector has begun are still in the
// cache for the next. Forward traffic: x once, y once. Backward traffic: x and dy once, dx once,
// with
//   g[t] = dy[t] * act'(sum),  dx[p] = sum over j of g[p + j] * w[width - 1 - j]
// Each chunk computes g of the width - 1 tokens after it once more, and adds its part of the
// gradients of weight and bias in registers; the parts are added in the order of the chunks.
#include "causal_conv1d.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/vec.h"
#include "../elementwise/gelu_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kBlock = 512;  // channels of a task

// Calls body(std::integral_constant<int, width>()) for the width met at run time.
template <typename Body>
void with_width(int64_t width, const Body& body) {
  switch (width) {
#define FUSEDOPS_WIDTH_CASE(number) \
  case number:                      \
    return body(std::integral_constant<int, number>());
    FUSEDOPS_WIDTH_CASE(2)
    FUSEDOPS_WIDTH_CASE(3)
    FUSEDOPS_WIDTH_CASE(4)
    FUSEDOPS_WIDTH_CASE(5)
    FUSEDOPS_WIDTH_CASE(6)
    FUSEDOPS_WIDTH_CASE(7)
    FUSEDOPS_WIDTH_CASE(8)
#undef FUSEDOPS_WIDTH_CASE
  }
}

// Calls column(chunk, first channel, count, full) for all vectors of channels of all chunks.
template <typename T, typename Column>
void run_chunks(const CausalConv1d& a, int64_t chunks, int64_t rows, const Column& column) {
  const int64_t blocks = (a.channels + kBlock - 1) / kBlock;
  const int64_t bytes = 3 * sizeof(T) * std::min(a.channels, kBlock) * rows;
  parallel_rows(chunks * blocks, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % blocks * kBlock;
      const int64_t columns = std::min(kBlock, a.channels - first);
      for_each_vector<Vec<T>::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        column(task / blocks, first + c, count, full);
      });
    }
  });
}

// A vector of channels of one sequence: its parameters, and its inputs by position, those of the
// initial state before 0.
template <typename T, int kWidth, typename Full>
struct Column {
  using V = Vec<T>;

  Column(const CausalConv1d& a, int64_t sequence, int64_t channel, int64_t count)
      : tokens(a.starts[sequence + 1] - a.starts[sequence]),
        count(count),
        x(static_cast<const T*>(a.input) + a.starts[sequence] * a.input_stride + channel),
        x_stride(a.input_stride),
        state_stride(a.channels),
        state_offset(sequence * (kWidth - 1) * a.channels + channel),
        silu(a.silu) {
    using A = Acc<T>;
    if (a.initial_state != nullptr) {
      initial = static_cast<const T*>(a.initial_state) + state_offset;
    }
    const auto* weight = static_cast<const A*>(a.weight) + channel;
    for (int k = 0; k < kWidth; ++k) w[k] = load_vec(weight + k * a.channels, count, Full());
    bias = V(A(0));
    if (a.bias != nullptr) bias = load_vec(static_cast<const A*>(a.bias) + channel, count, Full());
  }

  V input(int64_t position) const {
    if (position >= 0) return load_vec(x + position * x_stride, count, Full());
    if (initial == nullptr) return V(Acc<T>(0));
    return load_vec(initial + (position + kWidth - 1) * state_stride, count, Full());
  }

  V sum(const V (&window)[kWidth]) const {
    V total = bias;
#pragma GCC unroll 8
    for (int k = 0; k < kWidth; ++k) total = at::vec::fmadd(w[k], window[k], total);
    return total;
  }

  V w[kWidth];
  V bias;
  int64_t tokens;
  int64_t count;
  const T* x;
  int64_t x_stride;
  const T* initial = nullptr;
  int64_t state_stride;
  int64_t state_offset;  // of the sequence's first row of a state
  bool silu;
};

// Moves a window one token on; its last place is free then.
template <typename V, int kWidth>
inline __attribute__((always_inline)) void shift(V (&window)[kWidth]) {
#pragma GCC unroll 8
  for (int k = 0; k + 1 < kWidth; ++k) window[k] = window[k + 1];
}

template <typename T, int kWidth, typename Full>
void forward_column(const CausalConv1dForward& a, const ConvChunk& chunk, int64_t channel,
                    int64_t count, Full full) {
  using V = Vec<T>;
  const int64_t channels = a.call.channels;
  const Column<T, kWidth, Full> column(a.call, chunk.sequence, channel, count);
  T* output = static_cast<T*>(a.output) + a.call.starts[chunk.sequence] * channels + channel;
  V window[kWidth];
  for (int k = 0; k + 1 < kWidth; ++k) window[k] = column.input(chunk.begin - kWidth + 1 + k);
  for (int64_t t = chunk.begin; t < chunk.end; ++t) {
    window[kWidth - 1] = column.input(t);
    V sum = column.sum(window);
    if (column.silu) sum = gelu_value<T, Activation::silu>(sum);
    store_vec(output + t * channels, sum, count, full);
    shift(window);
  }
  if (chunk.end < column.tokens) return;
  T* state = static_cast<T*>(a.state) + column.state_offset;
  for (int k = 0; k + 1 < kWidth; ++k) store_vec(state + k * channels, window[k], count, full);
}

template <typename T, int kWidth, typename Full>
void backward_column(const CausalConv1dBackward& a, const ConvChunk& chunk, int64_t index,
                     int64_t channel, int64_t count, Full full) {
  using V = Vec<T>;
  using A = Acc<T>;
  constexpr int kHistory = kWidth - 1;
  const V zero(A(0));
  const int64_t channels = a.call.channels, start = a.call.starts[chunk.sequence];
  const Column<T, kWidth, Full> column(a.call, chunk.sequence, channel, count);
  const int64_t tokens = column.tokens;
  const T* dy = nullptr;
  if (a.grad_output != nullptr) {
    dy = static_cast<const T*>(a.grad_output) + start * a.grad_output_stride + channel;
  }
  const auto at_state = [&](auto* states) { return states + column.state_offset; };
  const T* dstate = static_cast<const T*>(a.grad_state);
  T* dinitial = static_cast<T*>(a.grad_initial_state);
  T* dx = static_cast<T*>(a.grad_input);
  if (dx != nullptr) dx += start * channels + channel;

  V window[kWidth], grads[kWidth], dw[kWidth], dbias = zero;
  for (int k = 0; k < kHistory; ++k) window[k] = column.input(chunk.begin - kHistory + k);
  for (int k = 0; k < kWidth; ++k) grads[k] = dw[k] = zero;
  for (int64_t t = chunk.begin; t < chunk.end + kHistory; ++t) {
    V grad = zero;
    if (t < tokens && dy != nullptr) {
      window[kHistory] = column.input(t);
      grad = load_vec(dy + t * a.grad_output_stride, count, full);
      if (column.silu) grad = grad * gelu_slope<T, Activation::silu>(column.sum(window));
      if (t < chunk.end) {
#pragma GCC unroll 8
        for (int k = 0; k < kWidth; ++k) dw[k] = at::vec::fmadd(grad, window[k], dw[k]);
        dbias = dbias + grad;
      }
      shift(window);
    }
    grads[kHistory] = grad;
    // The position whose last gradient this was; those before 0 are of the initial state.
    const int64_t position = t - kHistory;
    if (position >= chunk.begin || (position < 0 && chunk.begin == 0)) {
      V sum = zero;
      if (position >= 0 && t < tokens) {
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          sum = at::vec::fmadd(grads[j], column.w[kHistory - j], sum);
      } else {
        // What is no token has no gradient, whatever the weight is.
        for (int j = 0; j < kWidth; ++j) {
          const bool is_token = position + j >= 0 && position + j < tokens;
          if (is_token) sum = at::vec::fmadd(grads[j], column.w[kHistory - j], sum);
        }
      }
      const int64_t kept = position - (tokens - kHistory);
      if (dstate != nullptr && kept >= 0) {
        sum = sum + load_vec(at_state(dstate) + kept * channels, count, full);
      }
      if (position >= 0) {
        if (dx != nullptr) store_vec(dx + position * channels, sum, count, full);
      } else if (dinitial != nullptr) {
        store_vec(at_state(dinitial) + (position + kHistory) * channels, sum, count, full);
      }
    }
    shift(grads);
  }
  if (a.partials == nullptr) return;
  A* partial = static_cast<A*>(a.partials) + index * (kWidth + 1) * channels + channel;
  for (int k = 0; k < kWidth; ++k) store_vec(partial + k * channels, dw[k], count, full);
  store_vec(partial + kWidth * channels, dbias, count, full);
}

int64_t longest(const ConvChunk* chunks, int64_t count) {
  int64_t rows = 1;
  for (int64_t i = 0; i < count; ++i) rows = std::max(rows, chunks[i].end - chunks[i].begin);
  return rows;
}

}  // namespace

void causal_conv1d_forward(const CausalConv1dForward& a, const ConvChunk* chunks, int64_t count) {
  switch_dtype(a.call.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(a.call.width, [&](auto width) {
      const auto column = [&](int64_t chunk, int64_t channel, int64_t lanes, auto full) {
        forward_column<T, width()>(a, chunks[chunk], channel, lanes, full);
      };
      run_chunks<T>(a.call, count, longest(chunks, count), column);
    });
  });
}

void causal_conv1d_backward(const CausalConv1dBackward& a, const ConvChunk* chunks, int64_t count) {
  switch_dtype(a.call.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(a.call.width, [&](auto width) {
      const auto column = [&](int64_t chunk, int64_t channel, int64_t lanes, auto full) {
        backward_column<T, width()>(a, chunks[chunk], chunk, channel, lanes, full);
      };
      run_chunks<T>(a.call, count, longest(chunks, count), column);
    });
    if (a.grad_parameters != nullptr) {
      using A = Acc<T>;
      const int64_t columns = (a.call.width + 1) * a.call.channels;
      sum_partials(static_cast<const A*>(a.partials), count, columns, columns,
                   static_cast<A*>(a.grad_parameters));
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
