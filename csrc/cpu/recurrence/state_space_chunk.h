// A chunk of tokens of selective_state_space. With `total`, the sum of step * A from the chunk's
// begin to a token, itself included,
//
//   output = exp(total) * (C @ state) + lower(C @ B.T * exp(total[i] - total[j])) @ (step * x)
//   state = exp(total[last]) * state + B.T @ (exp(total[last] - total) * step * x)
//
// States stand transposed, [state_dim, head_dim]. Everything is in buffers of one thread and in the
// accumulation type. Rows are padded to 16 elements; no product sums over what is added.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <utility>

#include "../common/exp2_vec.h"
#include "../common/scratch.h"
#include "../common/vec.h"
#include "chunk_products.h"
#include "log_decays.h"
#include "scan_rows.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kChunkTokens = 64;

template <typename T>
class StateSpaceChunk {
 public:
  using A = Acc<T>;
  using V = Vec<A>;
  static constexpr int64_t kLength = kChunkTokens;

  explicit StateSpaceChunk(const StateSpace& call)
      : width(padded_size(call.head_dim)),
        depth(padded_size(call.state_dim)),
        call_(call),
        memory_(kLength * (3 * depth + 3 * width + 3 * kLength + 5) + depth) {
    A* next = memory_.data();
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    b = take(kLength * depth);
    c = take(kLength * depth);
    b_columns_ = take(kLength * depth);
    x = take(kLength * width);
    x_step = take(kLength * width);
    x_left = take(kLength * width);
    products = take(kLength * kLength);
    decays = take(kLength * kLength);
    scores = take(kLength * kLength);
    step = take(kLength);
    total_ = take(kLength);
    low_total_ = take(kLength);
    rise = take(kLength);
    left = take(kLength);
    decay_ = take(depth);
  }

  // Reads B and C of some rows of tokens, and multiplies them.
  void load_group(int64_t first_row, int64_t tokens, int64_t group) {
    load_b(first_row, tokens, group);
    for (int64_t i = 0; i < rows; ++i) load(call_.c, i, group, call_.state_dim, c + i * depth);
    transpose_small(b, depth, padded_size(count), depth, b_columns_, kLength);
    multiply_small(SmallProduct<A>{.a = {c, depth, 1},
                                   .b = b_columns_,
                                   .b_stride = kLength,
                                   .c = products,
                                   .c_stride = kLength,
                                   .rows = rows,
                                   .columns = padded_size(count),
                                   .depth = call_.state_dim,
                                   .lower_triangle = true});
  }

  // What the state after the chunk needs of B.
  void load_b(int64_t first_row, int64_t tokens, int64_t group) {
    first = first_row;
    count = tokens;
    rows = (count + kProductRows - 1) / kProductRows * kProductRows;
    for (int64_t i = 0; i < padded_size(count); ++i) {
      load(call_.b, i, group, call_.state_dim, b + i * depth);
    }
  }

  // Reads input and steps of a head.
  void load_head(int64_t head) {
    const auto* steps = static_cast<const A*>(call_.steps) + first * call_.heads + head;
    const A rate = static_cast<const A*>(call_.a)[head];
    LogSum<A> sum;
    for (int64_t i = 0; i < padded_size(count); ++i) {
      if (i < count) {
        step[i] = steps[i * call_.heads];
        sum.add(step[i] * rate);
      }
      totals_[i] = sum;
      total_[i] = sum.high();
      low_total_[i] = sum.low();
    }
    for (int64_t i = 0; i < count; i += V::size()) {
      exp_unbiased(V::loadu(total_ + i)).store(rise + i);
      sum.decay_since(total_ + i, low_total_ + i).store(left + i);
    }
    std::fill_n(decay_, depth, rise[count - 1]);
    for (int64_t i = 0; i < padded_size(count); ++i) {
      load(call_.input, i, head, call_.head_dim, x + i * width);
      if (i >= count) continue;
      scale_row(step[i], x + i * width, width, x_step + i * width);
      scale_row(left[i], x_step + i * width, width, x_left + i * width);
    }
  }

  // Decays between tokens, and scores, their products with those of C and B; 0 for later tokens.
  void load_scores() {
    for (int64_t i = 0; i < rows; ++i) {
      A *decay = decays + i * kLength, *score = scores + i * kLength;
      for (int64_t j = 0; j <= i; j += V::size()) {
        const int64_t lanes = i < count ? std::min<int64_t>(V::size(), i + 1 - j) : 0;
        const V factor = totals_[i].decay_since(total_ + j, low_total_ + j);
        const V product = factor * V::loadu(products + i * kLength + j);
        V::set(V(A(0)), factor, lanes).store(decay + j);
        V::set(V(A(0)), product, lanes).store(score + j);
      }
    }
  }

  // The outputs [tokens, head_dim] without D and z; `state` is null for zeros.
  void outputs(const A* state, A* to) const {
    SmallProduct<A> product{.a = {c, depth, 1},
                            .b = state,
                            .b_stride = width,
                            .c = to,
                            .c_stride = width,
                            .rows = rows,
                            .columns = width,
                            .depth = call_.state_dim};
    if (state != nullptr) {
      multiply_small(product);
      product.start = Start::scaled;
      product.scale = rise;
    }
    product.a = {scores, kLength, 1};
    product.b = x_step;
    product.depth = count;
    multiply_small<Shape::lower>(product);
  }

  // to = decay of the chunk * to + left.T @ right, for `left` B or C and rows of a head. Without
  // `adds`, `to` is only written.
  void accumulate(const A* left_rows, const A* right, A* to, bool adds) const {
    multiply_small(SmallProduct<A>{.a = {left_rows, 1, depth},
                                   .b = right,
                                   .b_stride = width,
                                   .c = to,
                                   .c_stride = width,
                                   .rows = depth,
                                   .columns = width,
                                   .depth = count,
                                   .start = adds ? Start::scaled : Start::zero,
                                   .scale = decay_});
  }

  A decay() const { return decay_[0]; }

  const int64_t width, depth;  // padded sizes of a head and of the state
  int64_t first, count, rows;  // the first row, the tokens, and these rounded up to a tile
  A *b, *c, *x, *x_step, *x_left;
  A *products, *decays, *scores;
  A *step, *rise, *left;

 private:
  void load(const TokenRows& from, int64_t i, int64_t part, int64_t columns, A* to) const {
    if (i >= count) {
      std::fill_n(to, padded_size(columns), A(0));
      return;
    }
    load_row(static_cast<const T*>(from.data) + (first + i) * from.stride + part * columns, columns,
             to);
  }

  const StateSpace& call_;
  Scratch<A> memory_;
  A *b_columns_, *total_, *low_total_, *decay_;
  LogSum<A> totals_[kLength];
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
