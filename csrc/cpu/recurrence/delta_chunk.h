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

// y[i] = f(x[i]) for whole vectors of rows that are padded.
template <typename A, typename F>
inline void map_row(const A* x, A* y, int64_t columns, const F& f) {
  for (int64_t c = 0; c < columns; c += Vec<A>::size()) f(Vec<A>::loadu(x + c)).store(y + c);
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

  DeltaChunk(const DeltaRule& call, int64_t most_tokens)
      : key_size(padded<A>(call.key_dim)),
        most(most_tokens),
        call_(call),
        memory_(most * (6 * key_size + 6 * most + 6) + key_size +
                (call.per_channel ? most + 3 : 0) * most * key_size) {
    A* next = memory_.data();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    query = take(most * key_size);
    key = take(most * key_size);
    read = take(2 * most * key_size);
    written = take(most * key_size);
    keys_ = take(most * key_size);
    dots_ = take(2 * most * most);
    decays = take(most * most);
    keys_by_keys = take(most * most);
    scores = take(most * most);
    system = take(most * most);
    beta = take(most);
    query_factors = take(most);
    key_factors = take(most);
    rise = take(most);
    left = take(most);
    sums_ = take(most);
    state_decay = take(key_size);
    if (!call.per_channel) return;
    token_decay = take(most * key_size);
    rise_rows = take(most * key_size);
    left_rows = take(most * key_size);
    decayed_ = take(most * most * key_size);
  }

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
      const V rate(beta[i]);
      map_row(keys_by_keys + i * most, system + i * most, padded<A>(i + 1),
              [&](const V& x) { return x * rate; });
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
    map_row(state_decay, state_decay, key_size, [](const V& x) { return exp_of<A>(x); });
  }

  // The keys up to token i, each with the decay of the tokens after it up to i.
  A* decayed(int64_t i) const { return decayed_ + i * most * key_size; }

  // Multiplies row i of `from` by a number, or by a row of channels where there are such.
  void scale_row(int64_t i, const A* from, A* to, const A* of_rows, const A* of_channels) const {
    const A* x = from + i * key_size;
    if (of_channels == nullptr) {
      const V factor(of_rows[i]);
      map_row(x, to, key_size, [&](const V& value) { return value * factor; });
      return;
    }
    for (int64_t c = 0; c < key_size; c += V::size()) {
      (V::loadu(x + c) * V::loadu(of_channels + i * key_size + c)).store(to + c);
    }
  }

  // The state that a chunk reads is multiplied by `read`: rows of keys, then of queries, both with
  // the decay since the chunk's begin. It receives those of `written`.
  A* read_keys() const { return read; }
  A* read_queries() const { return read + rows * key_size; }

  // Sizes of rows: of keys in memory, and of matrices over tokens.
  const int64_t key_size, most;
  int64_t count = 0, rows = 0;  // tokens, and with padding
  A *query, *key, *read, *written;
  A* decays;                              // exp(G[i] - G[j]), with a gate per head
  A *keys_by_keys, *system, *scores;      // A without beta, A and P
  A *beta, *query_factors, *key_factors;  // the factors are those of the norms
  A *rise, *left;                         // exp(G) and exp(G[last] - G), with a gate per head
  A* state_decay;                         // exp(G[last]) of each channel
  A* token_decay = nullptr;               // with a gate per channel
  A *rise_rows = nullptr, *left_rows = nullptr;  // the same

 private:
  void load(const DeltaRows& source, int64_t entry, int64_t first, int64_t head, A scale, A* to,
            A* factors) const {
    for (int64_t i = 0; i < count; ++i) {
      A* row = to + i * key_size;
      widen_row(row_of<T>(source, entry, first + i, head), call_.key_dim, row);
      factors[i] = call_.qk_norm ? 1 / std::sqrt(dot(row, row, key_size) + A(1e-6)) : A(1);
      const V factor(factors[i] * scale);
      map_row(row, row, key_size, [&](const V& x) { return x * factor; });
    }
    if (most > 1) std::fill(to + count * key_size, to + padded<A>(count) * key_size, A(0));
  }

  const A* gate_of(int64_t at) const {
    return static_cast<const A*>(call_.gate) + at * (call_.per_channel ? call_.key_dim : 1);
  }

  void scale_rows() const {
    for (int64_t i = 0; i < count; ++i) {
      scale_row(i, key, read_keys() + i * key_size, rise, rise_rows);
      scale_row(i, query, read_queries() + i * key_size, rise, rise_rows);
      scale_row(i, key, written + i * key_size, left, left_rows);
    }
    for (A* matrix : {read_keys(), read_queries(), written}) {
      std::fill(matrix + count * key_size, matrix + rows * key_size, A(0));
    }
  }

  void load_gates(const A* gate) {
    A total = 0;
    for (int64_t i = 0; i < count; ++i) sums_[i] = total += gate[i * call_.heads];
    std::fill(sums_ + count, sums_ + padded<A>(count), total);
    const V last(total);
    const auto exponential = [](const V& x) { return exp_of<A>(x); };
    map_row(sums_, rise, padded<A>(count), exponential);
    map_row(sums_, left, padded<A>(count), [&](const V& x) { return exp_of<A>(last - x); });
    std::fill(state_decay, state_decay + key_size, rise[count - 1]);
    scale_rows();
    for (int64_t i = 0; i < count; ++i) {
      const V here(sums_[i]);
      const A *of_keys = dots_ + i * most, *of_queries = of_keys + most * most;
      for (int64_t j = 0; j <= i; j += V::size()) {
        const V decay = exp_of<A>(here - V::loadu(sums_ + j));
        const int64_t at = i * most + j;
        decay.store(decays + at);
        (V::loadu(of_keys + j) * decay).store(keys_by_keys + at);
        (V::loadu(of_queries + j) * decay).store(scores + at);
      }
    }
  }

  void load_channels(const A* gate) {
    for (int64_t i = 0; i < count; ++i) {
      A* decay = token_decay + i * key_size;
      widen_row(gate + i * call_.heads * call_.key_dim, call_.key_dim, decay);
      map_row(decay, decay, key_size, [](const V& x) { return exp_of<A>(x); });
    }
    const V one(A(1));
    map_row(token_decay, rise_rows, key_size, [](const V& x) { return x; });
    for (int64_t i = 1; i < count; ++i) {
      scale_row(i - 1, rise_rows, rise_rows + i * key_size, nullptr, token_decay + key_size);
    }
    A* after = left_rows + (count - 1) * key_size;
    map_row(after, after, key_size, [&](const V&) { return one; });
    for (int64_t i = count - 1; i > 0; --i) {
      scale_row(i, left_rows, left_rows + (i - 1) * key_size, nullptr, token_decay);
    }
    const A* last = rise_rows + (count - 1) * key_size;
    std::copy(last, last + key_size, state_decay);
    scale_rows();
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        const A *before = decayed(i - 1) + j * key_size, *decay = token_decay + i * key_size;
        for (int64_t c = 0; c < key_size; c += V::size()) {
          (V::loadu(before + c) * V::loadu(decay + c)).store(decayed(i) + j * key_size + c);
        }
      }
      std::copy_n(key + i * key_size, key_size, decayed(i) + i * key_size);
      for (int64_t j = 0; j <= i; ++j) {
        const A* other = decayed(i) + j * key_size;
        keys_by_keys[i * most + j] = dot(key + i * key_size, other, key_size);
        scores[i * most + j] = dot(query + i * key_size, other, key_size);
      }
    }
  }

  const DeltaRule& call_;
  Scratch<A> memory_;
  A *decayed_ = nullptr, *keys_, *dots_, *sums_;  // keys transposed, keys and queries by keys, G
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
