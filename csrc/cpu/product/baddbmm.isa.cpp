// Batches of matrix products, and sums over broadcast dimensions (interface: baddbmm.h).
//
// Each product, or some rows or columns of one where the batch is short, is computed by one thread,
// which finishes it in registers (gemm_single_thread.h): a broadcast addend is never materialised
// and the output is written once. A single row, a long sum and the gradient of a broadcast operand,
// which is one product of several factors, are calls of gemm.isa.cpp that add to its tiles in L1:
// sums stay in float32 and nothing is written between them.
//
// Sums over dimensions go piece by piece: kPiece elements of the result are accumulated in L1 while
// the gradient is read once. Long sums are cut into parts by size alone, which are added in order.
#include "baddbmm.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/workspace.h"
#include "../gemm/epilogue.h"
#include "../gemm/gemm_single_thread.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kLeastTask = int64_t{1} << 18;  // multiply-adds that are worth a thread
constexpr int64_t kLeastWork = 4096;              // of a product, however small
constexpr int64_t kPiece = 2048;                  // elements that are summed at a time

template <typename T>
const T* advanced(const void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + offset;
}

struct AddendContext {
  void* output;  // [m, n]
  int64_t n;
  Matrix addend;
  double alpha;
  double beta;
};

template <typename T>
void store_sum(const void* context, const Tile& tile) {
  using V = Vec<T>;
  const auto& a = *static_cast<const AddendContext*>(context);
  const V alpha(static_cast<Acc<T>>(a.alpha)), beta(static_cast<Acc<T>>(a.beta));
  const T* addend = advanced<T>(
      a.addend.data, tile.row * a.addend.row_stride + tile.column * a.addend.column_stride);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    T* output = at<T>(a.output, tile.row + i, a.n, tile.column);
    if (addend == nullptr) {
      for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
        store_vec(output + c, alpha * load_vec(sums + c, count, full), count, full);
      });
      continue;
    }
    const T* row = addend + i * a.addend.row_stride;
    if (a.addend.column_stride == 0) {
      const V same = beta * V(static_cast<Acc<T>>(*row));
      for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
        store_vec(output + c, at::vec::fmadd(alpha, load_vec(sums + c, count, full), same), count,
                  full);
      });
    } else {
      for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
        const V added = beta * load_vec(row + c, count, full);
        store_vec(output + c, at::vec::fmadd(alpha, load_vec(sums + c, count, full), added), count,
                  full);
      });
    }
  }
}

// Product `index` of the batch.
template <typename T>
void one_product(const BatchedProduct& a, int64_t index, std::vector<Factors>& factors) {
  const auto offset = a.batch.offsets(index);
  GemmCall call = a.product;
  call.a.data = advanced<T>(a.product.a.data, offset[0]);
  call.b.data = advanced<T>(a.product.b.data, offset[1]);
  const int64_t terms = a.summed.count();
  factors.clear();
  for (int64_t term = 1; term < terms; ++term) {
    const auto extra = a.summed.offsets(term);
    factors.push_back({call.a, call.b});
    factors.back().a.data = advanced<T>(call.a.data, extra[0]);
    factors.back().b.data = advanced<T>(call.b.data, extra[1]);
  }
  if (terms == 0) call.k = 0;
  call.extra_products = factors.data();
  call.num_extra_products = static_cast<int64_t>(factors.size());
  AddendContext context{static_cast<T*>(a.output) + index * call.m * call.n, call.n, a.addend,
                        a.alpha, a.beta};
  context.addend.data = advanced<T>(a.addend.data, offset[2]);
  call.context = &context;
  call.store = store_sum<T>;
  call.touched[0] = {context.output, call.n};
  if (a.addend.column_stride == 1 && a.addend.row_stride != 0) {
    call.touched[1] = {context.addend.data, a.addend.row_stride};
  }
  gemm(call);
}

// The batch by gemm_single_thread.h.
template <typename Policy>
void products_alone(const BatchedProduct& a, const SingleThreadShape& shape) {
  using T = typename Policy::T;
  const int64_t batches = a.batch.count(), threads = at::get_num_threads();
  const int64_t work = kLeastWork + shape.m * shape.n * std::max<int64_t>(8, shape.k);
  // So many parts that the threads get equal shares, or nearly.
  int64_t parts = 1;
  if (threads > 1) {
    const int64_t most = std::max<int64_t>(1, work / kLeastTask);
    parts = std::min(most, ceil_div(2 * threads, batches));
    while (parts < most && batches * parts % threads != 0 && batches * parts < 16 * threads) {
      ++parts;
    }
  }
  // Parts are several tiles of rows, which are whole pieces of memory, or of columns.
  const int64_t least = 8 * kTileRows;
  const bool by_rows = shape.m >= parts * least || shape.m >= shape.n;
  const int64_t unit = by_rows ? kTileRows : kTileColumns<typename Policy::Sum>;
  const int64_t length = by_rows ? shape.m : shape.n;
  const int64_t size = ceil_div(ceil_div(length, parts), unit) * unit;
  parts = ceil_div(length, size);
  const auto operands_of = [&](int64_t index) -> Operands<T> {
    const auto offset = a.batch.offsets(index);
    return {advanced<T>(shape.a.data, offset[0]), advanced<T>(shape.b.data, offset[1]),
            advanced<T>(shape.addend.data, offset[2]),
            static_cast<T*>(a.output) + index * shape.m * shape.n};
  };
  const SingleThreadProduct<Policy> alone(shape);
  const int64_t tasks = batches * parts;
  // Several at a time, so that one is fetched while the one before it is multiplied.
  const int64_t even = threads > 1 ? tasks / (8 * threads) : tasks;
  const int64_t per_task = std::max({int64_t{1}, even, kLeastTask * parts / work});
  share_tasks(ceil_div(tasks, per_task), [&](const auto& next_group) {
    for (int64_t group; (group = next_group()) >= 0;) {
      const int64_t begin = group * per_task, end = std::min(tasks, begin + per_task);
      Operands<T> now = operands_of(begin / parts), next;
      for (int64_t task = begin; task < end; ++task) {
        const bool more = task + 1 < end;
        if (more) next = operands_of((task + 1) / parts);
        const int64_t from = task % parts * size, count = std::min(size, length - from);
        const Part part = by_rows ? Part{from, count, 0, shape.n} : Part{0, shape.m, from, count};
        alone.run(now, part, more && parts == 1 ? &next : nullptr);
        now = next;
      }
    }
  });
}

template <typename T>
void all_products(const BatchedProduct& a) {
  const int64_t batches = a.batch.count();
  const int64_t work = kLeastWork + std::max<int64_t>(1, a.product.m * a.product.n) *
                                        std::max<int64_t>(8, a.product.k) *
                                        std::max<int64_t>(1, a.summed.count());
  const auto run = [&](int64_t begin, int64_t end) {
    std::vector<Factors> factors;
    for (int64_t index = begin; index < end; ++index) one_product<T>(a, index, factors);
  };
  if (batches < 4 * at::get_num_threads() && work >= 4 * kLeastTask) {
    run(0, batches);  // each product is shared
  } else {
    at::parallel_for(0, batches, std::max<int64_t>(1, kLeastTask / work), run);
  }
}

// Adds elements [0, count) of `from` to `sums`, or their sum to sums[0].
template <typename T>
inline void accumulate(const T* from, int64_t count, bool lanes, Acc<T>* sums) {
  using V = Vec<T>;
  if (lanes) {
    for_each_vector<V::size()>(count, [&](int64_t c, int64_t n, auto full) {
      store_vec(sums + c, load_vec(sums + c, n, full) + load_vec(from + c, n, full), n, full);
    });
    return;
  }
  V total(Acc<T>(0));
  for_each_vector<V::size()>(
      count, [&](int64_t c, int64_t n, auto full) { total = total + load_vec(from + c, n, full); });
  sums[0] += sum_lanes(total);
}

template <typename T>
void sum_dims(const BroadcastSum& a) {
  using S = Acc<T>;
  const int64_t pieces = std::max<int64_t>(1, ceil_div(a.inner, kPiece));
  const int64_t kept = a.kept.count(), summed = a.summed.count();
  // Tasks are results [kept][pieces of inner] or [kept], each the sum of `terms` pieces in parts.
  const int64_t results = kept * (a.inner_kept ? pieces : 1);
  const int64_t terms = summed * (a.inner_kept ? 1 : pieces);
  if (results == 0) return;
  const int64_t width = a.inner_kept ? a.inner : 1;
  const int64_t parts = std::clamp<int64_t>(32 / results, 1, std::max<int64_t>(1, terms / 8));
  const int64_t in_part = std::max<int64_t>(1, ceil_div(terms, parts));
  S* partials = nullptr;
  if (parts > 1) {
    partials =
        static_cast<S*>(workspace(Workspace::partial_sums, parts * kept * width * sizeof(S)));
  }
  const int64_t bytes = in_part * std::min(a.inner, kPiece) * static_cast<int64_t>(sizeof(T));
  parallel_rows(results * parts, bytes, [&](int64_t begin, int64_t end) {
    S sums[kPiece];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task / results, result = task % results;
      const int64_t row = a.inner_kept ? result / pieces : result;
      const int64_t first = a.inner_kept ? result % pieces * kPiece : 0;
      const int64_t count = a.inner_kept ? std::min(kPiece, a.inner - first) : 1;
      std::fill_n(sums, count, S(0));
      const T* grad = static_cast<const T*>(a.grad) + a.kept.offsets(row)[0];
      for (int64_t term = part * in_part; term < std::min(terms, (part + 1) * in_part); ++term) {
        if (a.inner_kept) {
          accumulate<T>(grad + a.summed.offsets(term)[0] + first, count, true, sums);
        } else {
          const int64_t from = term % pieces * kPiece;
          accumulate<T>(grad + a.summed.offsets(term / pieces)[0] + from,
                        std::min(kPiece, a.inner - from), false, sums);
        }
      }
      const int64_t to = row * width + first;
      if (parts > 1) {
        std::copy_n(sums, count, partials + part * kept * width + to);
      } else {
        T* out = static_cast<T*>(a.out) + to;
        for (int64_t i = 0; i < count; ++i) {
          out[i] = static_cast<T>(static_cast<S>(a.scale) * sums[i]);
        }
      }
    }
  });
  if (parts == 1) return;
  T* out = static_cast<T*>(a.out);
  parallel_rows(kept * width, parts * static_cast<int64_t>(sizeof(S)),
                [&](int64_t begin, int64_t end) {
                  for (int64_t i = begin; i < end; ++i) {
                    S sum = 0;
                    for (int64_t part = 0; part < parts; ++part)
                      sum += partials[part * kept * width + i];
                    out[i] = static_cast<T>(static_cast<S>(a.scale) * sum);
                  }
                });
}

}  // namespace

void batched_product(const BatchedProduct& a) {
  const GemmCall& call = a.product;
  const SingleThreadShape shape{call.m, call.n, call.k, call.a, call.b, a.addend, a.alpha, a.beta};
  with_policy(call.dtype, [&](auto policy) {
    using Policy = decltype(policy);
    if constexpr (!kTiled<Policy>) {
      if (a.summed.count() == 1 && a.batch.count() > 0 && call.n > 0 &&
          SingleThreadProduct<Policy>::takes(shape)) {
        return products_alone<Policy>(a, shape);
      }
    }
    all_products<typename Policy::T>(a);
  });
}

void broadcast_sum(const BroadcastSum& a) {
  switch_dtype(a.dtype, [&](auto t) { sum_dims<decltype(t)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
