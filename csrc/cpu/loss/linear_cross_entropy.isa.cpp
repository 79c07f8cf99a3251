// Epilogues of linear_cross_entropy (interface: linear_cross_entropy.h).
//
// Forward: the sums of a chunk are stored unrounded, and cross_entropy.isa.cpp walks them.
// Backward: with the statistics of a row known a logit's gradient needs nothing but the logit, so
// that it is made on the tile of sums in L1; what is written is the operand of the two products
// that follow. Logits that were kept are walked row by row.
#include "linear_cross_entropy.h"

#include "../../common/parallel.h"
#include "../gemm/epilogue.h"
#include "cross_entropy_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T>
void store_logits(const void* context, const Tile& tile) {
  using A = Acc<T>;
  const auto& a = *static_cast<const ChunkLogits*>(context);
  const T* bias = at<T>(a.bias, 0, 0, tile.column);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const A*>(tile.sums) + i * tile.stride;
    const int64_t row = a.index != nullptr ? a.index[tile.row + i] : tile.row + i;
    A* logits = at<A>(a.logits, row, a.row_stride, tile.column);
    for_each_vector<Vec<T>::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      Vec<T> z = load_vec(sums + c, count, full);
      if (bias != nullptr) z = z + load_vec(bias + c, count, full);
      store_vec(logits + c, z, count, full);
    });
  }
}

template <typename T, bool kCapped, bool kTokens>
void store_gradient(const void* context, const Tile& tile) {
  using A = Acc<T>;
  const auto& a = *static_cast<const ChunkGradient*>(context);
  const T* bias = at<T>(a.bias, 0, 0, tile.column);
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i;
    const auto* sums = static_cast<const A*>(tile.sums) + i * tile.stride;
    T* grad = at<T>(a.grad_logits, row, a.product.n, tile.column);
    const GradientOfRow<T, kCapped, kTokens> gradient(a.gradient[row], a.options);
    for_each_vector<Vec<T>::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      Vec<T> z = load_vec(sums + c, count, full);
      if (bias != nullptr) z = z + load_vec(bias + c, count, full);
      store_vec(grad + c, gradient.at(z), count, full);
    });
    const int64_t column = a.target[row] - a.first - tile.column;
    if (column >= 0 && column < tile.columns) {
      const A shift = bias != nullptr ? static_cast<A>(bias[column]) : A(0);
      grad[column] = static_cast<T>(gradient.at_target(sums[column] + shift));
    }
  }
}

template <typename T, bool kCapped, bool kTokens>
void kept_gradient(const KeptGradient& a) {
  using A = Acc<T>;
  parallel_rows(a.rows, 3 * a.columns * sizeof(A), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = a.index != nullptr ? a.index[row] : row;
      const A* z = static_cast<const A*>(a.logits) + from * a.row_stride;
      T* grad = static_cast<T*>(a.grad_logits) + row * a.columns;
      const GradientOfRow<T, kCapped, kTokens> gradient(a.gradient[row], a.options);
      for_each_vector<Vec<T>::size()>(a.columns, [&](int64_t c, int64_t count, auto full) {
        store_vec(grad + c, gradient.at(load_vec(z + c, count, full)), count, full);
      });
      const int64_t column = a.target[row] - a.first;
      if (column >= 0 && column < a.columns)
        grad[column] = static_cast<T>(gradient.at_target(z[column]));
    }
  });
}

template <typename T>
void store_sum(const void* context, const Tile& tile) {
  using A = Acc<T>;
  const auto& a = *static_cast<const ChunkSum*>(context);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* part = static_cast<const A*>(tile.sums) + i * tile.stride;
    A* sums = at<A>(a.sums, tile.row + i, a.product.n, tile.column);
    T* output = at<T>(a.output, tile.row + i, a.product.n, tile.column);
    for_each_vector<Vec<T>::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      Vec<T> sum = load_vec(part + c, count, full);
      if (!a.first) sum = sum + load_vec(sums + c, count, full);
      if (output != nullptr)
        store_vec(output + c, sum, count, full);
      else
        store_vec(sums + c, sum, count, full);
    });
  }
}

// Runs the product of `a` with the epilogue that pick(T()) names.
template <typename Arguments, typename Pick>
void run(const Arguments& a, const Pick& pick) {
  GemmCall product = a.product;
  product.context = &a;
  switch_dtype(product.dtype, [&](auto t) { product.store = pick(t); });
  gemm(product);
}

}  // namespace

void chunk_logits(const ChunkLogits& a) {
  run(a, [](auto t) { return store_logits<decltype(t)>; });
}

void chunk_gradient(const ChunkGradient& a) {
  with_form(a.options, [&](auto capped, auto tokens) {
    run(a, [&](auto t) { return store_gradient<decltype(t), capped, tokens>; });
  });
}

void kept_gradient(const KeptGradient& a) {
  switch_dtype(a.dtype, [&](auto t) {
    with_form(a.options,
              [&](auto capped, auto tokens) { kept_gradient<decltype(t), capped, tokens>(a); });
  });
}

void chunk_sum(const ChunkSum& a) {
  run(a, [](auto t) { return store_sum<decltype(t)>; });
}

}  // namespace fusedops::CPU_CAPABILITY
