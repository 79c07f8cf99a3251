// selective_state_space on the CPU, forward (formulae: state_space_chunk.h).
//
// A task is some heads of a group in one sequence: B, C and their product are read and computed
// once for them. Their states stay in L2 (32 KiB each for 64 x 128) from the first chunk to the
// last. Traffic: the inputs once, the output once, the state once in and out. A chunk of 64 tokens
// of a head takes 1.2 million multiply-adds for these sizes.
//
// A sequence of one token, which generation has, goes through the state once in its own layout.
#include "selective_state_space.h"

#include <algorithm>
#include <cmath>

#include "../../common/parallel.h"
#include "../elementwise/gelu_vec.h"
#include "state_space_chunk.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int kStepRows = 4;

// The elements of one row of the output: y + D * x, times silu(z).
template <typename T>
inline void finish_row(const StateSpaceForward& f, int64_t row, int64_t head, const Acc<T>* y) {
  using V = Vec<T>;
  const StateSpace& a = f.call;
  const int64_t place = head * a.head_dim;
  const auto of = [&](const TokenRows& rows) {
    return static_cast<const T*>(rows.data) + row * rows.stride + place;
  };
  T* to = static_cast<T*>(f.output) + row * a.heads * a.head_dim + place;
  for_each_vector<V::size()>(a.head_dim, [&](int64_t p, int64_t count, auto full) {
    V value = load_vec(y + p, count, full);
    if (a.d != nullptr) {
      const V factor(static_cast<const Acc<T>*>(a.d)[head]);
      value = at::vec::fmadd(factor, load_vec(of(a.input) + p, count, full), value);
    }
    if (a.z.data != nullptr) {
      value = value * gelu_value<T, Activation::silu>(load_vec(of(a.z) + p, count, full));
    }
    store_vec(to + p, value, count, full);
  });
}

// A sequence of one token.
template <typename T>
void run_token(const StateSpaceForward& f, int64_t sequence, int64_t head, Acc<T>* outputs) {
  using A = Acc<T>;
  using V = Vec<A>;
  const StateSpace& a = f.call;
  const int64_t row = a.starts[sequence], size = a.state_dim;
  const A step = static_cast<const A*>(a.steps)[row * a.heads + head];
  const V decay(std::exp(step * static_cast<const A*>(a.a)[head]));
  const int64_t state = (sequence * a.heads + head) * a.state_size();
  const auto* initial = static_cast<const A*>(a.initial_state);
  const A* from = initial == nullptr ? nullptr : initial + state;
  A* to = static_cast<A*>(f.state) + state;
  const auto of_group = [&](const TokenRows& rows) {
    const int64_t group = head / (a.heads / a.groups);
    return static_cast<const T*>(rows.data) + row * rows.stride + group * size;
  };
  const T *b = of_group(a.b), *c = of_group(a.c);
  const T* x = static_cast<const T*>(a.input.data) + row * a.input.stride + head * a.head_dim;
  const auto run_rows = [&](int64_t p, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    V sum[kRows], added[kRows];
    for (int r = 0; r < kRows; ++r) {
      sum[r] = V(A(0));
      added[r] = V(step * static_cast<A>(x[p + r]));
    }
    for_each_vector<V::size()>(size, [&](int64_t n, int64_t count, auto full) {
      const V write = load_vec(b + n, count, full), read = load_vec(c + n, count, full);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        // A decay that is not finite shows in the product with a state of zeros, too.
        const V before = from == nullptr ? V(0) : load_vec(from + (p + r) * size + n, count, full);
        const V value = at::vec::fmadd(decay, before, added[r] * write);
        store_vec(to + (p + r) * size + n, value, count, full);
        sum[r] = at::vec::fmadd(value, read, sum[r]);
      }
    });
    for (int r = 0; r < kRows; ++r) outputs[p + r] = sum_lanes(sum[r]);
  };
  int64_t p = 0;
  for (; p + kStepRows <= a.head_dim; p += kStepRows) {
    run_rows(p, std::integral_constant<int, kStepRows>());
  }
  for (; p < a.head_dim; ++p) run_rows(p, std::integral_constant<int, 1>());
  finish_row<T>(f, row, head, outputs);
}

// Heads [first, first + count) of one group in one sequence.
template <typename T>
class Forward {
  using A = Acc<T>;

 public:
  explicit Forward(const StateSpaceForward& f)
      : f_(f),
        chunk_(f.call),
        layout_(f.call.head_dim, f.call.state_dim),
        states_(f.call.heads_per_task() * layout_.size()),
        rows_(layout_.size()),
        outputs_(kChunkTokens * chunk_.width) {}

  void run(int64_t sequence, int64_t first_head, int64_t num_heads, int64_t) {
    const StateSpace& a = f_.call;
    const int64_t begin = a.starts[sequence], end = a.starts[sequence + 1];
    if (end - begin == 1) {
      for (int64_t h = 0; h < num_heads; ++h) {
        run_token<T>(f_, sequence, first_head + h, outputs_.data());
      }
      return;
    }
    const int64_t place = (sequence * a.heads + first_head) * a.state_size();
    const auto* initial = static_cast<const A*>(a.initial_state);
    for (int64_t h = 0; h < num_heads; ++h) {
      const A* from = initial == nullptr ? nullptr : initial + place + h * a.state_size();
      layout_.load(from, a.head_dim, rows_.data(), state(h));
    }
    for (int64_t row = begin; row < end; row += kChunkTokens) {
      const int64_t tokens = std::min(kChunkTokens, end - row);
      chunk_.load_group(row, tokens, first_head / (a.heads / a.groups));
      const bool has_state = initial != nullptr || row > begin;
      for (int64_t h = 0; h < num_heads; ++h) run_chunk(first_head + h, state(h), has_state);
    }
    A* last = static_cast<A*>(f_.state) + place;
    for (int64_t h = 0; h < num_heads; ++h) {
      layout_.store(state(h), a.head_dim, rows_.data(), last + h * a.state_size());
    }
  }

 private:
  A* state(int64_t h) { return states_.data() + h * layout_.size(); }

  void run_chunk(int64_t head, A* state, bool has_state) {
    chunk_.load_head(head);
    chunk_.load_scores();
    chunk_.outputs(has_state ? state : nullptr, outputs_.data());
    for (int64_t i = 0; i < chunk_.count; ++i) {
      finish_row<T>(f_, chunk_.first + i, head, outputs_.data() + i * chunk_.width);
    }
    chunk_.accumulate(chunk_.b, chunk_.x_left, state, has_state);
  }

  const StateSpaceForward& f_;
  StateSpaceChunk<T> chunk_;
  const StateLayout<A> layout_;
  Scratch<A> states_, rows_, outputs_;
};

template <typename T>
void run_tokens(const StateSpaceForward& f) {
  const StateSpace& a = f.call;
  const auto bytes = static_cast<int64_t>(2 * a.state_size() * sizeof(Acc<T>));
  parallel_rows(a.sequences * a.heads, bytes, [&](int64_t begin, int64_t end) {
    Scratch<Acc<T>> outputs(a.head_dim);
    for (int64_t task = begin; task < end; ++task) {
      run_token<T>(f, task / a.heads, task % a.heads, outputs.data());
    }
  });
}

template <typename T>
void run_tasks(const StateSpaceForward& f) {
  share_tasks(f.call.num_tasks(), [&](const auto& next) {
    Forward<T> forward(f);
    for (int64_t task; (task = next()) >= 0;) {
      f.call.for_task(task, [&](auto... where) { forward.run(where...); });
    }
  });
}

}  // namespace

void selective_state_space_forward(const StateSpaceForward& f) {
  switch_dtype(f.call.dtype, [&](auto t) {
    using T = decltype(t);
    if (f.call.of_single_tokens()) {
      run_tokens<T>(f);
    } else {
      run_tasks<T>(f);
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
