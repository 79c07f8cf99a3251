// Rows and states of state space models in a thread's buffers, padded to 16 elements.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/parallel.h"
#include "../common/vec.h"
#include "chunk_products.h"
#include "selective_state_space.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

inline int64_t padded_size(int64_t count) {
  return (count + 15) / 16 * 16;
}

// A row of memory to a padded row of its own, zeros after it.
template <typename T>
inline void load_row(const T* from, int64_t columns, Acc<T>* to) {
  for_each_vector<Vec<T>::size()>(columns, [&](int64_t c, int64_t count, auto full) {
    load_vec(from + c, count, full).store(to + c);
  });
  std::fill(to + columns, to + padded_size(columns), Acc<T>(0));
}

template <typename A>
inline A dot_row(const A* x, const A* y, int64_t columns) {
  Vec<A> sum(A(0));
  for_each_vector<Vec<A>::size()>(columns, [&](int64_t c, int64_t count, auto full) {
    sum = at::vec::fmadd(load_vec(x + c, count, full), load_vec(y + c, count, full), sum);
  });
  return sum_lanes(sum);
}

// to = factor * from, for whole vectors of a padded row; `from` may be `to`.
template <typename A>
inline void scale_row(A factor, const A* from, int64_t columns, A* to) {
  for (int64_t c = 0; c < columns; c += Vec<A>::size()) {
    (Vec<A>(factor) * Vec<A>::loadu(from + c)).store(to + c);
  }
}

// How the states of some rows (of a head, of channels) lie in a buffer: transposed and padded.
template <typename A>
struct StateLayout {
  StateLayout(int64_t most_rows, int64_t state_dim)
      : columns(state_dim), width(padded_size(most_rows)), depth(padded_size(state_dim)) {}

  int64_t size() const { return width * depth; }

  // From memory, [rows, columns], to [depth, width]; null is zeros. `buffer` has size() elements.
  void load(const A* from, int64_t rows, A* buffer, A* to) const {
    if (from == nullptr) {
      std::fill_n(to, size(), A(0));
      return;
    }
    for (int64_t row = 0; row < rows; ++row) {
      load_row(from + row * columns, columns, buffer + row * depth);
    }
    std::fill(buffer + rows * depth, buffer + size(), A(0));
    transpose_small(buffer, depth, width, depth, to, width);
  }

  void store(const A* from, int64_t rows, A* buffer, A* to) const {
    transpose_small(from, width, depth, width, buffer, depth);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(buffer + row * depth, columns, to + row * columns);
    }
  }

  int64_t columns, width, depth;
};

// Adds the parts of gradients, those of tasks and of sequences, in their order.
template <typename T>
void add_parts(const StateSpaceBackward& f, int64_t elements_of_a) {
  using A = Acc<T>;
  const StateSpace& a = f.call;
  const int64_t columns = a.groups * a.state_dim, parts = a.tasks_per_group();
  const auto bytes = static_cast<int64_t>((parts + 1) * columns * sizeof(A));
  parallel_rows(a.tokens(), bytes, [&](int64_t begin, int64_t end) {
    const A* shares = static_cast<const A*>(f.shares) + begin * columns;
    for (void* to : {f.grad_b, f.grad_c}) {
      sum_partials(shares, parts, a.tokens() * columns, (end - begin) * columns,
                   static_cast<T*>(to) + begin * columns);
      shares += parts * a.tokens() * columns;
    }
  });
  const auto sum = [&](const void* from, int64_t elements, void* to) {
    sum_partials(static_cast<const A*>(from), a.sequences, elements, elements, static_cast<A*>(to));
  };
  sum(f.sequence_a, elements_of_a, f.grad_a);
  sum(f.sequence_d, a.heads, f.grad_d);
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
