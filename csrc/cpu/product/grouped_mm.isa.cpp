// Sums over the rows of a group, and products that are added to a buffer (interface: grouped_mm.h).
//
// A task of the sums is a piece of the columns of one group, whose sums stay in L1 while its rows
// are read once. Rows are added in pieces of kRowsTogether, and these in order: long sums keep
// their precision, and nothing depends on the threads.
#include "grouped_mm.h"

#include <algorithm>
#include <vector>

#include "../../common/parallel.h"
#include "../gemm/epilogue.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kPiece = 512;         // columns of a task
constexpr int64_t kRowsTogether = 128;  // rows of a partial sum

template <typename T>
void sum_piece(const GroupSums& a, int64_t group, int64_t first, int64_t count) {
  using S = Acc<T>;
  using V = Vec<T>;
  const int64_t begin = group == 0 ? 0 : a.ends[group - 1], end = a.ends[group];
  S total[kPiece], part[kPiece];
  std::fill_n(total, count, S(0));
  for (int64_t from = begin; from < end; from += kRowsTogether) {
    std::fill_n(part, count, S(0));
    for (int64_t r = from; r < std::min(end, from + kRowsTogether); ++r) {
      const T* row = at<T>(a.values, a.places == nullptr ? r : a.places[r], a.columns, first);
      const V scale(a.scale == nullptr ? S(1) : static_cast<const S*>(a.scale)[r]);
      for_each_vector<V::size()>(count, [&](int64_t c, int64_t n, auto full) {
        const V sum =
            at::vec::fmadd(scale, load_vec(row + c, n, full), load_vec(part + c, n, full));
        store_vec(part + c, sum, n, full);
      });
    }
    for (int64_t c = 0; c < count; ++c) total[c] += part[c];
  }
  if (a.adds) {
    S* into = at<S>(a.sums, group, a.columns, first);
    for (int64_t c = 0; c < count; ++c) into[c] += total[c];
    return;
  }
  T* out = at<T>(a.sums, group, a.columns, first);
  for (int64_t c = 0; c < count; ++c) out[c] = static_cast<T>(total[c]);
}

template <typename T, bool kStream>
void store_gradient(const void* context, const Tile& tile) {
  using V = Vec<T>;
  const auto& a = *static_cast<const WeightGradient*>(context);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    T* out = at<T>(a.gradient, tile.row + i, a.product.n, tile.column);
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t n, auto full) {
      store_or_stream(kStream, out + c, load_vec(sums + c, n, full), n, full);
    });
  }
}

template <typename T>
void store_added(const void* context, const Tile& tile) {
  using V = Vec<T>;
  using S = Acc<T>;
  const auto& a = *static_cast<const AddedProduct*>(context);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const S*>(tile.sums) + i * tile.stride;
    S* into = at<S>(a.into, tile.row + i, a.row_stride, tile.column);
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t n, auto full) {
      store_vec(into + c, load_vec(into + c, n, full) + load_vec(sums + c, n, full), n, full);
    });
  }
}

template <typename Each, typename Store>
void run_batch(const Each* products, int64_t count, const Store& store) {
  if (count == 0) return;
  std::vector<GemmCall> calls;
  switch_dtype(products[0].product.dtype, [&](auto t) {
    for (int64_t i = 0; i < count; ++i) {
      calls.push_back(products[i].product);
      calls.back().context = products + i;
      calls.back().store = store(t);
    }
  });
  gemm_batch(calls.data(), count);
}

}  // namespace

void group_sums(const GroupSums& a) {
  const int64_t pieces = (a.columns + kPiece - 1) / kPiece;
  switch_dtype(a.dtype, [&](auto t) {
    share_tasks(a.groups * pieces, [&](const auto& next) {
      for (int64_t task; (task = next()) >= 0;) {
        const int64_t first = task % pieces * kPiece;
        sum_piece<decltype(t)>(a, task / pieces, first, std::min(kPiece, a.columns - first));
      }
    });
  });
}

void weight_gradients(const WeightGradient* gradients, int64_t count) {
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) rows += gradients[i].product.m;
  run_batch(gradients, count, [&](auto t) {
    using T = decltype(t);
    const auto* stack = static_cast<const T*>(gradients[0].gradient);
    return should_stream(stack, rows, gradients[0].product.n) ? store_gradient<T, true>
                                                              : store_gradient<T, false>;
  });
}

void add_products(const AddedProduct* products, int64_t count) {
  run_batch(products, count, [](auto t) { return store_added<decltype(t)>; });
}

}  // namespace fusedops::CPU_CAPABILITY
