// gated_delta_rule on the CPU, forward (formulae: fusedops/ops/_delta_math.py).
//
// A task is a head of a sequence: its state stays in L2 (64 KiB for 128 x 128) from the first
// chunk to the last. Columns of the state are independent, so with fewer heads than threads a task
// is a part of the columns, and their bits are the same. Traffic: the inputs once, the output once,
// the state once in and out. A chunk of 64 tokens takes 3 products with the state and 3 with
// triangular matrices of 64 x 64: 4.2 million multiply-adds for sizes of 128.
//
// A chunk of one token, which generation has, goes through the state twice, 64 columns at a time:
// from memory to L1 for key @ state, from there for the new state and the output.
#include "gated_delta_rule.h"

#include <ATen/Parallel.h>

#include "../../common/parallel.h"
#include "delta_chunk.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int kStepVectors = 4;

// One token. `from` is null for a state of zeros, and may be `to`. A decay that is not finite shows
// in the products with zeros, too.
template <typename T, int kVectors, typename Full>
inline void step_columns(const DeltaChunk<T>& chunk, int64_t key_dim, const T* value, T* output,
                         const Acc<T>* from, Acc<T>* to, int64_t stride, int64_t count, Full full) {
  using V = Vec<T>;
  constexpr int W = V::size();
  V sum[kVectors], change[kVectors];
  const auto before = [&](int64_t k, int j) {
    return from == nullptr ? V(0) : load_vec(from + k * stride + j * W, count, full);
  };
  for (int j = 0; j < kVectors; ++j) sum[j] = V(0);
  for (int64_t k = 0; k < key_dim; ++k) {
    const V factor(chunk.key[k] * chunk.state_decay[k]);
    for (int j = 0; j < kVectors; ++j) sum[j] = at::vec::fmadd(factor, before(k, j), sum[j]);
  }
  for (int j = 0; j < kVectors; ++j) {
    change[j] = V(chunk.beta[0]) * (load_vec(value + j * W, count, full) - sum[j]);
    sum[j] = V(0);
  }
  for (int64_t k = 0; k < key_dim; ++k) {
    const V row(chunk.key[k]), decay(chunk.state_decay[k]), query(chunk.query[k]);
    for (int j = 0; j < kVectors; ++j) {
      const V state = at::vec::fmadd(decay, before(k, j), row * change[j]);
      store_vec(to + k * stride + j * W, state, count, full);
      sum[j] = at::vec::fmadd(query, state, sum[j]);
    }
  }
  for (int j = 0; j < kVectors; ++j) store_vec(output + j * W, sum[j], count, full);
}

template <typename T>
void step(const DeltaChunk<T>& chunk, int64_t key_dim, int64_t columns, const T* value, T* output,
          const Acc<T>* from, Acc<T>* to, int64_t stride) {
  constexpr int64_t W = Vec<T>::size();
  const auto at = [&](int64_t c) { return from == nullptr ? nullptr : from + c; };
  int64_t c = 0;
  for (; c + kStepVectors * W <= columns; c += kStepVectors * W) {
    step_columns<T, kStepVectors>(chunk, key_dim, value + c, output + c, at(c), to + c, stride, W,
                                  std::true_type());
  }
  for (; c + W <= columns; c += W) {
    step_columns<T, 1>(chunk, key_dim, value + c, output + c, at(c), to + c, stride, W,
                       std::true_type());
  }
  if (c < columns) {
    step_columns<T, 1>(chunk, key_dim, value + c, output + c, at(c), to + c, stride, columns - c,
                       std::false_type());
  }
}

// Columns of the state of a head.
template <typename T>
class Forward {
  using A = Acc<T>;
  using V = Vec<A>;

 public:
  Forward(const DeltaRule& call, int64_t width)
      : call_(call),
        chunk_(call, chunk_tokens(call)),
        width_(padded<A>(width)),
        state_(chunk_.key_size * width_),
        products_(2 * chunk_.most * width_) {}

  void run(int64_t sequence, int64_t head, int64_t column, int64_t columns) {
    const Tokens tokens(call_, sequence);
    const int64_t state =
        (sequence * call_.heads + head) * call_.key_dim * call_.value_dim + column;
    const int64_t key_head = head / (call_.heads / call_.key_heads);
    for (int64_t k = 0; k < call_.key_dim; ++k) {
      A* row = state_.data() + k * width_;
      if (call_.initial_state == nullptr) {
        std::fill(row, row + width_, A(0));
      } else {
        widen_row(static_cast<const A*>(call_.initial_state) + state + k * call_.value_dim, columns,
                  row);
      }
    }
    for (int64_t first = tokens.begin; first < tokens.end; first += chunk_.most) {
      const int64_t count = std::min(chunk_.most, tokens.end - first);
      const auto value = [&](int64_t i) {
        return row_of<T>(call_.value, tokens.entry, first + i, head) + column;
      };
      T* output = static_cast<T*>(call_.output) +
                  ((tokens.entry * call_.tokens + first) * call_.heads + head) * call_.value_dim +
                  column;
      if (count == 1) {
        chunk_.load_token(tokens.entry, first, key_head, head);
        const bool zero = call_.initial_state == nullptr && first == tokens.begin;
        step<T>(chunk_, call_.key_dim, columns, value(0), output, zero ? nullptr : state_.data(),
                state_.data(), width_);
        continue;
      }
      chunk_.load_keys(tokens.entry, first, count, key_head);
      chunk_.load_head(tokens.entry, first, head);
      compute(columns, value, output);
    }
    A* last = static_cast<A*>(call_.final_state) + state;
    for (int64_t k = 0; k < call_.key_dim; ++k) {
      std::copy_n(state_.data() + k * width_, columns, last + k * call_.value_dim);
    }
  }

 private:
  template <typename Value>
  void compute(int64_t columns, const Value& value, T* output) {
    const int64_t rows = chunk_.rows, wide = padded<A>(columns);
    A *changes = products_.data(), *outputs = changes + rows * width_;
    // Both products with the state.
    SmallProduct<A> product{.a = {chunk_.read, chunk_.key_size, 1},
                            .b = state_.data(),
                            .b_stride = width_,
                            .c = changes,
                            .c_stride = width_,
                            .rows = 2 * rows,
                            .columns = wide,
                            .depth = call_.key_dim};
    multiply_small(product);
    for (int64_t i = 0; i < chunk_.count; ++i) {
      const V beta(chunk_.beta[i]);
      A* row = changes + i * width_;
      for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        (beta * (load_vec(value(i) + c, count, full) - V::loadu(row + c))).store(row + c);
      });
    }
    product.rows = rows;
    product.depth = chunk_.count;
    product.a = {chunk_.system, chunk_.most, 1};
    product.b = changes;
    multiply_small<Shape::solve_lower>(product);
    product.a = {chunk_.scores, chunk_.most, 1};
    product.c = outputs;
    product.start = Start::add;
    multiply_small<Shape::lower>(product);
    for (int64_t i = 0; i < chunk_.count; ++i) {
      T* to = output + i * call_.heads * call_.value_dim;
      for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
        store_vec(to + c, V::loadu(outputs + i * width_ + c), count, full);
      });
    }
    product.a = {chunk_.written, 1, chunk_.key_size};
    product.c = state_.data();
    product.rows = chunk_.key_size;
    product.start = Start::scaled;
    product.scale = chunk_.state_decay;
    multiply_small(product);
  }

  const DeltaRule& call_;
  DeltaChunk<T> chunk_;
  const int64_t width_;
  Scratch<A> state_, products_;
};

template <typename T>
void run_steps(const DeltaRule& call) {
  const int64_t state = call.key_dim * call.value_dim;
  const int64_t heads_per_key = call.heads / call.key_heads;
  const auto bytes = static_cast<int64_t>(2 * state * sizeof(Acc<T>));
  parallel_rows(call.sequences * call.heads, bytes, [&](int64_t begin, int64_t end) {
    DeltaChunk<T> chunk(call, 1);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t entry = task / call.heads, head = task % call.heads;
      const auto* from = static_cast<const Acc<T>*>(call.initial_state);
      chunk.load_token(entry, 0, head / heads_per_key, head);
      step<T>(chunk, call.key_dim, call.value_dim, row_of<T>(call.value, entry, 0, head),
              static_cast<T*>(call.output) + task * call.value_dim,
              from == nullptr ? nullptr : from + task * state,
              static_cast<Acc<T>*>(call.final_state) + task * state, call.value_dim);
    }
  });
}

template <typename T>
void run_chunks(const DeltaRule& call) {
  const int64_t pairs = call.sequences * call.heads;
  const int64_t most = std::max<int64_t>(1, call.value_dim / 32);
  const int64_t parts = std::clamp<int64_t>(at::get_num_threads() / pairs, 1, most);
  const int64_t width = padded<Acc<T>>((call.value_dim + parts - 1) / parts);
  const int64_t slices = (call.value_dim + width - 1) / width;
  share_tasks(pairs * slices, [&](const auto& next) {
    Forward<T> forward(call, width);
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t pair = task / slices, column = task % slices * width;
      forward.run(pair / call.heads, pair % call.heads, column,
                  std::min(width, call.value_dim - column));
    }
  });
}

}  // namespace

void gated_delta_rule(const DeltaRule& call) {
  if (call.sequences * call.heads * call.value_dim == 0) return;
  switch_dtype(call.dtype, [&](auto t) {
    using T = decltype(t);
    if (call.tokens == 1 && call.ends == nullptr) {
      run_steps<T>(call);
    } else {
      run_chunks<T>(call);
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
