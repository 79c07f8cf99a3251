// A chunk of tokens of the gated delta rule, without its state: queries, keys, decays and the two
// triangular matrices (fusedops/ops/_delta_math.py has the formulae).
//
// Everything is in buffers of one thread and in the accumulation type. Rows are padded to whole
// vectors and their number to a tile of products; what is added is zero, and no product sums over
// it. No exponent is positive: with a gate per head the difference of cumulated gates is taken
// first; with one per channel a key is multiplied by the decay of each token that follows it.
//
// Include from *.isa.cpp only.
#pragma once

#include <cmath>
#include <utility>

#include "../common/exp2_vec.h"
#include "../common/scratch.h"
#include "../common/vec.h"
#include "chunk_products.h"
#include "gated_delta_rule.h"
#include "log_decays.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kMostTokens = 64;     // of a chunk
constexpr int64_t kChannelTokens = 16;  // of a chunk with a gate per channel

// Whole vectors.
template <typename A>
inline int64_t padded(int64_t count) {
  constexpr int64_t W = Vec<A>::size();
  return (count + W - 1) / W * W;
}

inline int64_t chunk_tokens(const DeltaRule& call) {
  return call.per_channel ? kChannelTokens : kMostTokens;
}

// The tokens of a sequence, in the entry of the batch where they lie.
struct Tokens {
  int64_t entry, begin, end;

  Tokens(const DeltaRule& call, int64_t sequence) : entry(sequence), begin(0), end(call.tokens) {
    if (call.ends == nullptr) return;
    entry = 0;
    begin = call.ends[sequence];
    end = call.ends[sequence + 1];
  }
};

template <typename T>
inline const T* row_of(const DeltaRows& rows, int64_t entry, int64_t token, int64_t head) {
  return static_cast<const T*>(rows.data) + entry * rows.strides[0] + token * rows.strides[1] +
         head * rows.strides[2];
}

// to = f(from...) for whole vectors of rows that are padded.
template <typename A, typename F, typename... Rows>
inline void map_rows(A* to, int64_t columns, const F& f, const Rows*... from) {
  for (int64_t c = 0; c < columns; c += Vec<A>::size()) f(Vec<A>::loadu(from + c)...).store(to + c);
}

// to = x * y, and to = x * factor.
template <typename A>
inline void multiply_rows(A* to, int64_t columns, const A* x, const A* y) {
  map_rows(to, columns, [](const Vec<A>& a, const Vec<A>& b) { return a * b; }, x, y);
}

template <typename A>
inline void scale_row(A* to, int64_t columns, const A* x, A factor) {
  const Vec<A> wide(factor);
  map_rows(to, columns, [&](const Vec<A>& a) { return a * wide; }, x);
}

template <typename A>
inline void exponentiate_row(A* to, int64_t columns) {
  map_rows(to, columns, [](const Vec<A>& x) { return exp_unbiased(x); }, to);
}

template <typename A>
inline A dot(const A* x, const A* y, int64_t columns) {
  Vec<A> sum(A(0));
  for (int64_t c = 0; c < columns; c += Vec<A>::size()) {
    sum = at::vec::fmadd(Vec<A>::loadu(x + c), Vec<A>::loadu(y + c), sum);
  }
  return sum_lanes(sum);
}

// A row of memory to a padded row.
template <typename T>
inline void widen_row(const T* from, int64_t columns, Acc<T>* to) {
  for_each_vector<Vec<T>::size()>(columns, [&](int64_t c, int64_t count, auto full) {
    load_vec(from + c, count, full).store(to + c);
  });
  std::fill(to + columns, to + padded<Acc<T>>(columns), Acc<T>(0));
}

template <typename T>
class DeltaChunk {
 public:
  using A = Acc<T>;
  using V = Vec<A>;

  DeltaChunk(const DeltaRule& call, int64_t most_tokens) : call_(call), most(most_tokens) {}

  // Reads the queries and keys of `tokens` tokens of a key head.
  void load_keys(int64_t entry, int64_t first, int64_t tokens, int64_t key_head) {
    count = tokens;
    rows = (count + kProductRows - 1) / kProductRows * kProductRows;
    load(call_.query, entry, first, key_head, static_cast<A>(call_.scale), query, query_factors);
    load(call_.key, entry, first, key_head, A(1), key, key_factors);
    if (call_.per_channel) return;
    transpose_small(key, key_size, padded<A>(count), key_size, keys_, most);
    for (const A* left : {key, query}) {
      A* to = left == key ? dots_ : dots_ + most * most;
      multiply_small(SmallProduct<A>{.a = {left, key_size, 1},
                                     .b = keys_,
                                     .b_stride = most,
                                     .c = to,
                                     .c_stride = most,
                                     .rows = rows,
                                     .columns = padded<A>(count),
                                     .depth = call_.key_dim,
                                     .lower_triangle = true});
    }
  }

  // Reads gate and beta of a head, and computes what depends on them.
  void load_head(int64_t entry, int64_t first, int64_t head) {
    const int64_t at = (entry * call_.tokens + first) * call_.heads + head;
    for (int64_t i = 0; i < count; ++i) {
      beta[i] = static_cast<const A*>(call_.beta)[at + i * call_.heads];
    }
    std::fill(beta + count, beta + rows, A(0));
    if (call_.per_channel) {
      load_channels(gate_of(at));
    } else {
      load_gates(gate_of(at));
    }
    for (int64_t i = 0; i < count; ++i) {
      scale_row(system + i * most, padded<A>(i + 1), keys_by_keys + i * most, beta[i]);
    }
    for (int64_t i = count; i < rows; ++i) {
      for (A* matrix : {scores, keys_by_keys, decays, system}) {
        std::fill(matrix + i * most, matrix + i * most + rows, A(0));
      }
    }
  }

  // Reads what a chunk of one token needs: query, key, beta and the decay of the state.
  void load_token(int64_t entry, int64_t token, int64_t key_head, int64_t head) {
    count = 1;
    load(call_.query, entry, token, key_head, static_cast<A>(call_.scale), query, query_factors);
    load(call_.key, entry, token, key_head, A(1), key, key_factors);
    const int64_t at = (entry * call_.tokens + token) * call_.heads + head;
    beta[0] = static_cast<const A*>(call_.beta)[at];
    if (call_.per_channel) {
      widen_row(gate_of(at), call_.key_dim, state_decay);
    } else {
      std::fill(state_decay, state_decay + key_size, *gate_of(at));
    }
    exponentiate_row(state_decay, key_size);
  }

  // The keys up to token i, each with the decay of the tokens after it up to i.
  A* decayed(int64_t i) const { return decayed_ + i * most * key_size; }

  // Multiplies a row of token i by a number, or by a row of channels with a gate for each.
  void scale(int64_t i, const A* x, A* to, const A* of_tokens, const A* of_channels) const {
    if (!call_.per_channel) {
      scale_row(to, key_size, x, of_tokens[i]);
    } else {
      multiply_rows(to, key_size, x, of_channels + i * key_size);
    }
  }

  // The state that a chunk reads is multiplied by `read`: rows of keys, then of queries, both with
  // the decay since the chunk's begin. It receives those of `written`.
  A* read_keys() const { return read; }
  A* read_queries() const { return read + rows * key_size; }

 private:
  void load(const DeltaRows& source, int64_t entry, int64_t first, int64_t head, A scale, A* to,
            A* factors) const {
    for (int64_t i = 0; i < count; ++i) {
      A* row = to + i * key_size;
      widen_row(row_of<T>(source, entry, first + i, head), call_.key_dim, row);
      factors[i] = call_.qk_norm ? 1 / std::sqrt(dot(row, row, key_size) + A(1e-6)) : A(1);
      scale_row(row, key_size, row, factors[i] * scale);
    }
    if (most > 1) std::fill(to + count * key_size, to + padded<A>(count) * key_size, A(0));
  }

  const A* gate_of(int64_t at) const {
    return static_cast<const A*>(call_.gate) + at * (call_.per_channel ? call_.key_dim : 1);
  }

  void scale_rows() const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * key_size;
      scale(i, key + at, read_keys() + at, rise, rise_rows);
      scale(i, query + at, read_queries() + at, rise, rise_rows);
      scale(i, key + at, written + at, left, left_rows);
    }
    for (A* matrix : {read_keys(), read_queries(), written}) {
      std::fill(matrix + count * key_size, matrix + rows * key_size, A(0));
    }
  }

  void load_gates(const A* gate) {
    LogSum<A> total;
    LogSum<A> sums[kMostTokens];
    for (int64_t i = 0; i < padded<A>(count); ++i) {
      if (i < count) total.add(gate[i * call_.heads]);
      sums[i] = total;
      sums_[i] = total.high();
      low_sums_[i] = total.low();
    }
    const auto decay_to = [&](A* to, int64_t tokens, const LogSum<A>& sum) {
      for (int64_t j = 0; j < tokens; j += V::size()) {
        sum.decay_since(sums_ + j, low_sums_ + j).store(to + j);
      }
    };
    decay_to(left, padded<A>(count), total);
    std::copy_n(sums_, padded<A>(count), rise);
    exponentiate_row(rise, padded<A>(count));
    std::fill(state_decay, state_decay + key_size, rise[count - 1]);
    scale_rows();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * most, columns = padded<A>(i + 1);
      decay_to(decays + at, columns, sums[i]);
      multiply_rows(keys_by_keys + at, columns, dots_ + at, decays + at);
      multiply_rows(scores + at, columns, dots_ + most * most + at, decays + at);
    }
  }

  // The decay of the state is the exponential of a sum: a product of decays near 1, each of which
  // is rounded, has a bias that grows with the tokens.
  void load_channels(const A* gate) {
    const auto add = [](const V& a, const V& b) { return a + b; };
    for (int64_t i = 0; i < count; ++i) {
      A *decay = token_decay + i * key_size, *sum = rise_rows + i * key_size;
      widen_row(gate + i * call_.heads * call_.key_dim, call_.key_dim, decay);
      std::copy_n(decay, key_size, sum);
      if (i > 0) map_rows(sum, key_size, add, sum - key_size, decay);
    }
    exponentiate_row(token_decay, count * key_size);
    exponentiate_row(rise_rows, count * key_size);
    const int64_t last = (count - 1) * key_size;
    std::fill_n(left_rows + last, key_size, A(1));
    for (int64_t at = last; at > 0; at -= key_size) {
      multiply_rows(left_rows + at - key_size, key_size, left_rows + at, token_decay + at);
    }
    std::copy_n(rise_rows + last, key_size, state_decay);
    scale_rows();
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        const int64_t at = j * key_size;
        multiply_rows(decayed(i) + at, key_size, decayed(i - 1) + at, token_decay + i * key_size);
      }
      std::copy_n(key + i * key_size, key_size, decayed(i) + i * key_size);
      for (int64_t j = 0; j <= i; ++j) {
        const A* other = decayed(i) + j * key_size;
        keys_by_keys[i * most + j] = dot(key + i * key_size, other, key_size);
        scores[i * most + j] = dot(query + i * key_size, other, key_size);
      }
    }
  }

  A* take(int64_t size) { return std::exchange(next_, next_ + size); }

  const DeltaRule& call_;

 public:
  const int64_t most;                                 // tokens: the rows of matrices over tokens
  const int64_t key_size = padded<A>(call_.key_dim);  // of rows of queries and keys
  int64_t count = 0, rows = 0;                        // tokens, and with padding

 private:
  const int64_t of_channels_ = call_.per_channel ? most * key_size : 0;
  Scratch<A> memory_ =
      Scratch<A>(most * (6 * key_size + 6 * most + 7) + key_size + (most + 3) * of_channels_);
  A* next_ = memory_.data();
  A* keys_ = take(most * key_size);  // transposed
  A* dots_ = take(2 * most * most);  // keys and queries by keys
  A* sums_ = take(most);             // G
  A* low_sums_ = take(most);         // what the rounding of G lost
  A* decayed_ = take(most * of_channels_);

 public:
  A* query = take(most * key_size);
  A* key = take(most * key_size);
  A* read = take(2 * most * key_size);
  A* written = take(most * key_size);
  A* decays = take(most * most);        // exp(G[i] - G[j]), with a gate per head
  A* keys_by_keys = take(most * most);  // A without beta
  A* system = take(most * most);        // A
  A* scores = take(most * most);        // P
  A* beta = take(most);
  A* query_factors = take(most);  // of the norms
  A* key_factors = take(most);
  A* rise = take(most);               // exp(G), with a gate per head
  A* left = take(most);               // exp(G[last] - G)
  A* rise_rows = take(of_channels_);  // the same with a gate per channel
  A* left_rows = take(of_channels_);
  A* token_decay = take(of_channels_);
  A* state_decay = take(key_size);  // exp(G[last]) of each channel
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
