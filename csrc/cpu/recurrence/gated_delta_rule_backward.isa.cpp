// gated_delta_rule on the CPU, backward (formulae: fusedops/ops/_delta_math.py).
//
// A task is a key head of a sequence, with the heads that read it: the gradients of query and key
// are complete in it, and no sum depends on the number of threads. It goes through the tokens
// twice: forward for the states at the beginnings of the chunks, which stay in the thread's memory
// (64 KiB for each 64 tokens of a head of 128 x 128), and backward for the gradients. Both make
// the matrices of a chunk again. A chunk takes 10 products with a state or its gradient.
#include <numeric>

#include "../../common/parallel.h"
#include "delta_chunk.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T>
class Backward {
  using A = Acc<T>;
  using V = Vec<A>;

 public:
  explicit Backward(const DeltaRule& call) : call_(call), chunk_(call, chunk_tokens(call)) {}

  void run(int64_t sequence, int64_t key_head) {
    const Tokens tokens(call_, sequence);
    const int64_t most = chunk_.most, chunks = (tokens.end - tokens.begin + most - 1) / most;
    const size_t needed = std::max<int64_t>(1, chunks) * groups_ * state_size_;
    if (states_.size() < needed) states_.resize(needed);
    const auto head_of = [&](int64_t group) { return key_head * groups_ + group; };
    const auto load_keys = [&](int64_t number) {
      const int64_t first = tokens.begin + number * most;
      chunk_.load_keys(tokens.entry, first, std::min(most, tokens.end - first), key_head);
      return first;
    };
    for (int64_t g = 0; g < groups_; ++g) {
      load_state(call_.initial_state, sequence, head_of(g), state(0, g));
      load_state(call_.grad_final, sequence, head_of(g), grad_states_ + g * state_size_);
    }
    for (int64_t number = 0; number + 1 < chunks; ++number) {
      const int64_t first = load_keys(number);
      for (int64_t g = 0; g < groups_; ++g) {
        chunk_.load_head(tokens.entry, first, head_of(g));
        make_changes(tokens.entry, first, head_of(g), state(number, g));
        std::copy_n(state(number, g), state_size_, state(number + 1, g));
        add_tokens(chunk_.written, changes_, state(number + 1, g), Start::scaled);
      }
    }
    for (int64_t number = chunks - 1; number >= 0; --number) {
      const int64_t first = load_keys(number);
      std::fill_n(grad_query_, chunk_.rows * keys_, A(0));
      std::fill_n(grad_key_, chunk_.rows * keys_, A(0));
      for (int64_t g = 0; g < groups_; ++g) {
        chunk_.load_head(tokens.entry, first, head_of(g));
        run_head(tokens.entry, first, head_of(g), state(number, g), grad_states_ + g * state_size_);
      }
      const A scale = static_cast<A>(call_.scale);
      store_keys(call_.query, chunk_.query_factors, scale, tokens.entry, first, key_head,
                 grad_query_, call_.grad_query);
      store_keys(call_.key, chunk_.key_factors, A(1), tokens.entry, first, key_head, grad_key_,
                 call_.grad_key);
    }
    if (call_.grad_initial == nullptr) return;
    for (int64_t g = 0; g < groups_; ++g) {
      A* to = static_cast<A*>(call_.grad_initial) + state_at(sequence, head_of(g));
      for (int64_t k = 0; k < call_.key_dim; ++k) {
        std::copy_n(grad_states_ + g * state_size_ + k * width_, call_.value_dim,
                    to + k * call_.value_dim);
      }
    }
  }

 private:
  A* state(int64_t chunk, int64_t group) {
    return states_.data() + (chunk * groups_ + group) * state_size_;
  }

  int64_t state_at(int64_t sequence, int64_t head) const {
    return (sequence * call_.heads + head) * call_.key_dim * call_.value_dim;
  }

  void load_state(const void* from, int64_t sequence, int64_t head, A* to) const {
    std::fill_n(to, state_size_, A(0));
    if (from == nullptr) return;
    const A* rows = static_cast<const A*>(from) + state_at(sequence, head);
    for (int64_t k = 0; k < call_.key_dim; ++k) {
      widen_row(rows + k * call_.value_dim, call_.value_dim, to + k * width_);
    }
  }

  // A product over the tokens, keys or columns of a chunk, into rows of `c_stride`.
  SmallProduct<A> product(Left<A> a, const A* b, int64_t b_stride, int64_t depth, A* c,
                          int64_t c_stride, Start start = Start::zero) const {
    return {a, b, b_stride, c, c_stride, chunk_.rows, c_stride, depth, start};
  }

  // state += rows.T @ values, the state times its decay first where `start` says so.
  template <bool kNegative = false>
  void add_tokens(const A* rows, const A* values, A* state, Start start) const {
    auto sum = product({rows, 1, keys_}, values, width_, chunk_.count, state, width_, start);
    sum.rows = keys_;
    sum.scale = chunk_.state_decay;
    multiply_small<Shape::plain, kNegative>(sum);
  }

  // The values' rest and what the solved system makes of it.
  void make_changes(int64_t entry, int64_t first, int64_t head, const A* state) {
    multiply_small(product({chunk_.read, keys_, 1}, state, width_, call_.key_dim, rest_, width_));
    for (int64_t i = 0; i < chunk_.count; ++i) {
      const T* value = row_of<T>(call_.value, entry, first + i, head);
      const V beta(chunk_.beta[i]);
      A *rest = rest_ + i * width_, *change = changes_ + i * width_;
      for_each_vector<V::size()>(call_.value_dim, [&](int64_t c, int64_t count, auto full) {
        const V left = load_vec(value + c, count, full) - V::loadu(rest + c);
        left.store(rest + c);
        (beta * left).store(change + c);
      });
    }
    std::fill(changes_ + chunk_.count * width_, changes_ + chunk_.rows * width_, A(0));
    multiply_small<Shape::solve_lower>(
        product({chunk_.system, chunk_.most, 1}, changes_, width_, chunk_.count, changes_, width_));
  }

  void run_head(int64_t entry, int64_t first, int64_t head, const A* state, A* grad_state) {
    const int64_t count = chunk_.count, rows = chunk_.rows, most = chunk_.most;
    const int64_t at = (entry * call_.tokens + first) * call_.heads + head;
    const int64_t step = call_.heads * call_.value_dim;
    make_changes(entry, first, head, state);
    // Gradients of the output, then of the values: both are multiplied by the state.
    A* const grad_values = incoming_ + rows * width_;
    const T* grad = static_cast<const T*>(call_.grad_output) + at * call_.value_dim;
    for (int64_t i = 0; i < count; ++i) {
      widen_row(grad + i * step, call_.value_dim, incoming_ + i * width_);
    }
    std::fill(incoming_ + count * width_, grad_values, A(0));
    multiply_small(
        product({chunk_.written, keys_, 1}, grad_state, width_, call_.key_dim, solved_, width_));
    multiply_small<Shape::upper>(
        product({chunk_.scores, 1, most}, incoming_, width_, rows, solved_, width_, Start::add));
    multiply_small<Shape::solve_upper>(
        product({chunk_.system, 1, most}, solved_, width_, rows, solved_, width_));
    for (int64_t i = 0; i < rows; ++i) {
      scale_row(grad_values + i * width_, width_, solved_ + i * width_, chunk_.beta[i]);
    }
    if (call_.grad_value != nullptr) {
      T* to = static_cast<T*>(call_.grad_value) + at * call_.value_dim;
      for (int64_t i = 0; i < count; ++i) {
        for_each_vector<V::size()>(call_.value_dim, [&](int64_t c, int64_t lanes, auto full) {
          store_vec(to + i * step + c, V::loadu(grad_values + i * width_ + c), lanes, full);
        });
      }
    }
    transpose_small(changes_, width_, padded<A>(count), width_, changes_transposed_, most);
    for (const A* left : {incoming_, solved_}) {
      auto squares = product({left, width_, 1}, changes_transposed_, most, call_.value_dim,
                             left == incoming_ ? of_scores_ : of_system_, most);
      squares.columns = padded<A>(count);
      squares.lower_triangle = true;
      multiply_small(squares);
    }
    store_beta(at);
    transpose_small(state, width_, keys_, width_, transposed_, keys_);
    transpose_small(grad_state, width_, keys_, width_, grad_transposed_, keys_);
    auto by_state =
        product({incoming_, width_, 1}, transposed_, keys_, call_.value_dim, grad_rows_, keys_);
    by_state.rows = 2 * rows;
    multiply_small(by_state);
    multiply_small(product({changes_, width_, 1}, grad_transposed_, keys_, call_.value_dim,
                           grad_columns_, keys_));
    A* const key_rows = grad_rows_ + rows * keys_;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = i * keys_;
      chunk_.scale(i, grad_rows_ + row, grad_rows_ + row, chunk_.rise, chunk_.rise_rows);
      chunk_.scale(i, key_rows + row, key_rows + row, chunk_.rise, chunk_.rise_rows);
      scale_row(key_rows + row, keys_, key_rows + row, A(-1));
      chunk_.scale(i, grad_columns_ + row, grad_columns_ + row, chunk_.left, chunk_.left_rows);
    }
    add_gates_of_state(state, grad_state);
    if (call_.per_channel) {
      add_channels();
    } else {
      add_squares();
    }
    store_gates(at);
    add_keys();
    add_tokens(chunk_.read_queries(), incoming_, grad_state, Start::scaled);
    add_tokens<true>(chunk_.read_keys(), grad_values, grad_state, Start::add);
  }

  // Gradients of beta; `of_system_` becomes that of the products of keys, without their decay.
  void store_beta(int64_t at) {
    A* to = static_cast<A*>(call_.grad_beta);
    for (int64_t i = 0; i < chunk_.count; ++i) {
      A* row = of_system_ + i * chunk_.most;
      const A* keys = chunk_.keys_by_keys + i * chunk_.most;
      A sum = dot(solved_ + i * width_, rest_ + i * width_, width_);
      for (int64_t j = 0; j < i; ++j) {
        sum -= row[j] * keys[j];
        row[j] *= -chunk_.beta[i];
      }
      if (to != nullptr) to[at + i * call_.heads] = sum;
    }
  }

  // What the gates get of the state: a gate decays it for its token and all later ones, for what
  // earlier tokens of the chunk write, and for the next chunk.
  void add_gates_of_state(const A* state, const A* grad_state) {
    const auto add_products = [&](const A* x, const A* y) {
      map_rows(total_, keys_, at::vec::fmadd<A>, x, y, total_);
    };
    std::fill_n(total_, keys_, A(0));
    for (int64_t i = 0; i < chunk_.count; ++i) {
      std::copy_n(total_, keys_, grad_gates_ + i * keys_);
      add_products(chunk_.key + i * keys_, grad_columns_ + i * keys_);
    }
    for (int64_t k = 0; k < call_.key_dim; ++k) {
      total_[k] = chunk_.state_decay[k] * dot(state + k * width_, grad_state + k * width_, width_);
    }
    std::fill(total_ + call_.key_dim, total_ + keys_, A(0));
    for (int64_t i = chunk_.count - 1; i >= 0; --i) {
      A* gate = grad_gates_ + i * keys_;
      add_products(chunk_.query + i * keys_, grad_rows_ + i * keys_);
      add_products(chunk_.key + i * keys_, grad_rows_ + (chunk_.rows + i) * keys_);
      add_row(gate, total_, keys_);
    }
  }

  // Gradients of the products of queries and keys, with a gate per head. A gate decays those of
  // its token and later rows with earlier columns: `crossing_` has their sums for each gate.
  void add_squares() {
    const int64_t most = chunk_.most, rows = chunk_.rows;
    std::fill_n(total_, most, A(0));
    for (int64_t i = chunk_.count - 1; i >= 0; --i) {
      const int64_t row = i * most;
      map_rows(total_, padded<A>(i), at::vec::fmadd<A>, of_scores_ + row, chunk_.scores + row,
               total_);
      map_rows(total_, padded<A>(i), at::vec::fmadd<A>, of_system_ + row, chunk_.keys_by_keys + row,
               total_);
      V sum(A(0));
      for_each_vector<V::size()>(i, [&](int64_t j, int64_t lanes, auto full) {
        sum = sum + load_vec(total_ + j, lanes, full);
      });
      crossing_[i] = sum_lanes(sum);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (A* matrix : {of_scores_, of_system_}) {
        A* row = matrix + i * most;
        if (i >= chunk_.count) {
          std::fill(row, row + rows, A(0));
          continue;
        }
        multiply_rows(row, padded<A>(i + 1), row, chunk_.decays + i * most);
      }
      of_system_[i * most + i] = 0;
    }
    const auto add = [&](Left<A> a, const A* b, A* c) {
      return product(a, b, keys_, rows, c, keys_, Start::add);
    };
    multiply_small<Shape::lower>(add({of_scores_, most, 1}, chunk_.key, grad_rows_));
    multiply_small<Shape::lower>(add({of_system_, most, 1}, chunk_.key, grad_rows_ + rows * keys_));
    multiply_small<Shape::upper>(add({of_scores_, 1, most}, chunk_.query, grad_columns_));
    multiply_small<Shape::upper>(add({of_system_, 1, most}, chunk_.key, grad_columns_));
  }

  // The same with a gate per channel, from the last token to the first: `later_` has what a key
  // gets of the rows of later tokens, decayed to this one.
  void add_channels() {
    const int64_t most = chunk_.most;
    std::fill_n(later_, chunk_.count * keys_, A(0));
    for (int64_t i = chunk_.count - 1; i >= 0; --i) {
      const int64_t row = i * keys_;
      A *query_row = grad_rows_ + row, *key_row = query_row + chunk_.rows * keys_;
      for (int64_t j = 0; j <= i; ++j) {
        const V of_score(of_scores_[i * most + j]), of_key(j < i ? of_system_[i * most + j] : 0);
        const A* decayed = chunk_.decayed(i) + j * keys_;
        A *later = later_ + j * keys_, *column = grad_columns_ + j * keys_;
        for (int64_t c = 0; c < keys_; c += V::size()) {
          const V key = V::loadu(decayed + c);
          at::vec::fmadd(of_score, key, V::loadu(query_row + c)).store(query_row + c);
          at::vec::fmadd(of_key, key, V::loadu(key_row + c)).store(key_row + c);
          V sum = at::vec::fmadd(of_score, V::loadu(chunk_.query + row + c), V::loadu(later + c));
          sum = at::vec::fmadd(of_key, V::loadu(chunk_.key + row + c), sum);
          if (j == i) {
            (V::loadu(column + c) + sum).store(column + c);
          } else {
            A* gate = grad_gates_ + row + c;
            at::vec::fmadd(sum, key, V::loadu(gate)).store(gate);
            (sum * V::loadu(chunk_.token_decay + row + c)).store(later + c);
          }
        }
      }
    }
  }

  void store_gates(int64_t at) const {
    A* to = static_cast<A*>(call_.grad_gate);
    for (int64_t i = 0; to != nullptr && i < chunk_.count; ++i) {
      const A* gate = grad_gates_ + i * keys_;
      const int64_t place = at + i * call_.heads;
      if (call_.per_channel) {
        std::copy_n(gate, call_.key_dim, to + place * call_.key_dim);
      } else {
        to[place] = std::accumulate(gate, gate + call_.key_dim, crossing_[i]);
      }
    }
  }

  // Adds the gradients of this head's queries and keys to those of the key head.
  void add_keys() {
    const int64_t size = chunk_.count * keys_;
    add_row(grad_query_, grad_rows_, size);
    add_row(grad_key_, grad_rows_ + chunk_.rows * keys_, size);
    add_row(grad_key_, grad_columns_, size);
  }

  static void add_row(A* to, const A* x, int64_t columns) {
    map_rows(to, columns, [](const V& a, const V& b) { return a + b; }, to, x);
  }

  // Stores gradients of queries or keys from those of the normalised and scaled rows.
  void store_keys(const DeltaRows& source, const A* factors, A scale, int64_t entry, int64_t first,
                  int64_t head, A* grads, void* result) {
    if (result == nullptr) return;
    for (int64_t i = 0; i < chunk_.count; ++i) {
      A *grad = grads + i * keys_, *unit = total_;
      const V factor(factors[i] * scale);
      T* to = static_cast<T*>(result) +
              ((entry * call_.tokens + first + i) * call_.key_heads + head) * call_.key_dim;
      if (call_.qk_norm) {
        widen_row(row_of<T>(source, entry, first + i, head), call_.key_dim, unit);
        scale_row(unit, keys_, unit, factors[i]);
        const V along(dot(unit, grad, keys_));
        map_rows(grad, keys_, [&](const V& x, const V& y) { return x - along * y; }, grad, unit);
      }
      for_each_vector<V::size()>(call_.key_dim, [&](int64_t c, int64_t lanes, auto full) {
        store_vec(to + c, factor * V::loadu(grad + c), lanes, full);
      });
    }
  }

  A* take(int64_t size) { return std::exchange(next_, next_ + size); }

  const DeltaRule& call_;
  DeltaChunk<T> chunk_;
  const int64_t groups_ = call_.heads / call_.key_heads, keys_ = chunk_.key_size;
  const int64_t width_ = padded<A>(call_.value_dim), state_size_ = keys_ * width_;
  const int64_t tokens_by_keys_ = chunk_.most * keys_, tokens_by_values_ = chunk_.most * width_;
  const int64_t squares_ = chunk_.most * chunk_.most;
  Scratch<A> states_,
      memory_ = Scratch<A>((groups_ + 2) * state_size_ + 7 * tokens_by_keys_ +
                           6 * tokens_by_values_ + 2 * squares_ + keys_ + 2 * chunk_.most);
  A* next_ = memory_.data();
  A* grad_states_ = take(groups_ * state_size_);
  A* transposed_ = take(state_size_);  // the state, and its gradient
  A* grad_transposed_ = take(state_size_);
  A* rest_ = take(tokens_by_values_);
  A* changes_ = take(tokens_by_values_);
  A* changes_transposed_ = take(tokens_by_values_);
  A* incoming_ = take(2 * tokens_by_values_);  // gradients of the output, then of the values
  A* solved_ = take(tokens_by_values_);
  A* grad_rows_ = take(2 * tokens_by_keys_);  // of queries, then of keys as rows
  A* grad_columns_ = take(tokens_by_keys_);   // of keys as columns
  A* grad_query_ = take(tokens_by_keys_);
  A* grad_key_ = take(tokens_by_keys_);
  A* grad_gates_ = take(tokens_by_keys_);
  A* later_ = take(tokens_by_keys_);
  A* of_scores_ = take(squares_);
  A* of_system_ = take(squares_);
  A* crossing_ = take(chunk_.most);
  A* total_ = take(keys_ + chunk_.most);
};

}  // namespace

void gated_delta_rule_backward(const DeltaRule& call) {
  if (call.sequences * call.key_heads == 0) return;
  switch_dtype(call.dtype, [&](auto t) {
    share_tasks(call.sequences * call.key_heads, [&](const auto& next) {
      Backward<decltype(t)> backward(call);
      for (int64_t task; (task = next()) >= 0;) {
        backward.run(task / call.key_heads, task % call.key_heads);
      }
    });
  });
}

}  // namespace fusedops::CPU_CAPABILITY
