// Products of small matrices that lie in a thread's cache, for operators that compute a recurrence
// in chunks of tokens: nothing is packed, and a triangle of the left matrix may be the operand.
//
//   plain        c = start + a * b
//   lower        the same with a[i][k] for k <= i alone
//   upper        with k >= i alone
//   solve_lower  (1 + a) * x = c for x, in place of c, with a[i][k] for k < i; b is c
//   solve_upper  the same with k > i
//
// Each element is one chain of multiply-adds in the order of k (solve_upper: from the last row to
// the first), so its bits depend neither on the numbers of rows and columns nor on what stands in
// the other triangle. A tile of 4 rows and up to 4 vectors is in registers: 8 loads for 16
// multiply-adds, which Zen 5 does at 90 % of its peak.
//
// Include from *.isa.cpp only.
#pragma once

#include "../gemm/gemm_transpose.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int kProductRows = 4;  // of a tile: matrices of results have a multiple of these

enum class Shape { plain, lower, upper, solve_lower, solve_upper };
enum class Start { zero, add, scaled };

template <typename A>
using Lane = typename Lanes<A>::type;

// Element (i, k) of the left matrix.
template <typename A>
struct Left {
  const A* data;
  int64_t row_stride;
  int64_t step_stride;
};

template <typename A>
struct SmallProduct {
  Left<A> a;
  const A* b;
  int64_t b_stride;
  A* c;
  int64_t c_stride;
  int64_t rows;     // a multiple of kProductRows
  int64_t columns;  // whole vectors
  int64_t depth;
  Start start = Start::zero;
  const A* scale = nullptr;     // of the rows of c, for Start::scaled
  bool lower_triangle = false;  // of c: columns after a row's tile are not computed
};

template <typename A>
inline Lane<A> spread(A value) {
  return value - Lane<A>{};
}

template <typename A, int kVectors, Shape kShape, bool kNegative>
inline void product_tile(const SmallProduct<A>& p, int64_t row, int64_t column) {
  using V = Lane<A>;
  constexpr int W = kLanes<A>, R = kProductRows;
  constexpr bool kSolve = kShape == Shape::solve_lower || kShape == Shape::solve_upper;
  A* const c = p.c + row * p.c_stride + column;
  const A* const a = p.a.data + row * p.a.row_stride;
  const int64_t down = p.a.row_stride, step = p.a.step_stride;
  V sum[R][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      if (!kSolve && p.start == Start::zero) {
        sum[i][j] = V{};
        continue;
      }
      sum[i][j] = *reinterpret_cast<const V*>(c + i * p.c_stride + j * W);
      if (!kSolve && p.start == Start::scaled) sum[i][j] *= spread(p.scale[row + i]);
    }
  }
  const auto add = [&](int i, int j, const V& factor, const V& term)
                       __attribute__((always_inline)) {
                         if constexpr (kNegative || kSolve) {
                           sum[i][j] -= factor * term;
                         } else {
                           sum[i][j] += factor * term;
                         }
                       };
  int64_t first = 0, last = p.depth;
  if (kShape == Shape::lower || kShape == Shape::solve_lower) last = std::min(row, p.depth);
  if (kShape == Shape::upper || kShape == Shape::solve_upper) first = row + R;
  const A* from = p.b + first * p.b_stride + column;
  for (int64_t k = first; k < last; ++k, from += p.b_stride) {
    V terms[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) terms[j] = *reinterpret_cast<const V*>(from + j * W);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const V factor = spread(a[i * down + k * step]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) add(i, j, factor, terms[j]);
    }
  }
  // The square on the diagonal.
  if constexpr (kShape != Shape::plain) {
    constexpr bool kLower = kShape == Shape::lower || kShape == Shape::solve_lower;
#pragma GCC unroll 4
    for (int s = 0; s < R; ++s) {
      const int k = kShape == Shape::solve_upper ? R - 1 - s : s;
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        V term;
        if constexpr (kSolve) {
          term = sum[k][j];
        } else {
          term = *reinterpret_cast<const V*>(p.b + (row + k) * p.b_stride + column + j * W);
        }
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
          if ((kLower ? i < k : i > k) || (kSolve && i == k)) continue;
          add(i, j, spread(a[i * down + (row + k) * step]), term);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      *reinterpret_cast<V*>(c + i * p.c_stride + j * W) = sum[i][j];
    }
  }
}

template <typename A, int kVectors, Shape kShape, bool kNegative>
__attribute__((noinline)) void product_columns(const SmallProduct<A>& p, int64_t column) {
  const int64_t begin = p.lower_triangle ? column / kProductRows * kProductRows : 0;
  for (int64_t at = begin; at < p.rows; at += kProductRows) {
    const int64_t row = kShape == Shape::solve_upper ? p.rows - kProductRows - at : at;
    product_tile<A, kVectors, kShape, kNegative>(p, row, column);
  }
}

template <Shape kShape = Shape::plain, bool kNegative = false, typename A>
inline void multiply_small(const SmallProduct<A>& p) {
  constexpr int kMost = kVectorBytes == 64 ? 4 : 2, W = kLanes<A>;
  int64_t column = 0;
  for (; column + kMost * W <= p.columns; column += kMost * W) {
    product_columns<A, kMost, kShape, kNegative>(p, column);
  }
  if constexpr (kMost > 2) {
    for (; column + 2 * W <= p.columns; column += 2 * W) {
      product_columns<A, 2, kShape, kNegative>(p, column);
    }
  }
  for (; column < p.columns; column += W) product_columns<A, 1, kShape, kNegative>(p, column);
}

// to[j][i] = from[i][j]; rows and columns are whole vectors.
template <typename A>
__attribute__((noinline)) void transpose_small(const A* from, int64_t from_stride, int64_t rows,
                                               int64_t columns, A* to, int64_t to_stride) {
  constexpr int W = kLanes<A>;
  for (int64_t i = 0; i < rows; i += W) {
    for (int64_t j = 0; j < columns; j += W) {
      Lane<A> block[W];
      for (int r = 0; r < W; ++r) {
        block[r] = *reinterpret_cast<const Lane<A>*>(from + (i + r) * from_stride + j);
      }
      transpose<W>(block);
      for (int r = 0; r < W; ++r) {
        *reinterpret_cast<Lane<A>*>(to + (j + r) * to_stride + i) = block[r];
      }
    }
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
