// Epilogues of linear_act and mlp, and the pass over the gradient (interface: linear_act.h).
//
// Forward: bias, the kept pre-activation, activation and output are done on a tile of sums that
// gemm.isa.cpp leaves in L1: beyond the bare product only the pre-activation is written, once.
//
// Backward of linear_act: one pass reads grad_output and the pre-activation and writes their
// gradient, which both products then read; the bias gradient is summed in the same pass. Rows are
// cut into chunks that do not depend on the thread count and the chunks' sums are added in order.
//
// Backward of mlp: the same on the tiles of the product that makes the hidden gradient, so that
// there is no pass at all. The bias gradient is summed per tile height, then over tiles in order.
#include "linear_act.h"

#include <algorithm>
#include <vector>

#include "../../common/parallel.h"
#include "../common/vec.h"
#include "../gemm/epilogue.h"
#include "../gemm/gemm_kernel.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T, Activation A>
void store_forward(const void* context, const Tile& tile) {
  using V = Vec<T>;
  const auto& a = *static_cast<const LinearForward*>(context);
  const int64_t n = a.product.n;
  const T* bias = at<T>(a.bias, 0, n, tile.column);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    T* kept = at<T>(a.preactivation, tile.row + i, n, tile.column);
    T* output = at<T>(a.output, tile.row + i, n, tile.column);
    const V scale(a.bias_scale == nullptr ? Acc<T>(1)
                                          : static_cast<const Acc<T>*>(a.bias_scale)[tile.row + i]);
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      V z = load_vec(sums + c, count, full);
      if (bias != nullptr) z = at::vec::fmadd(scale, load_vec(bias + c, count, full), z);
      if (kept != nullptr) store_vec(kept + c, z, count, full);
      if (output != nullptr) store_vec(output + c, activated<T, A>(z), count, full);
    });
  }
}

template <typename T, Activation A>
void store_hidden_gradient(const void* context, const Tile& tile) {
  using V = Vec<T>;
  const auto& a = *static_cast<const HiddenGradient*>(context);
  const int64_t n = a.product.n;
  auto* partial = at<Acc<T>>(a.partials, tile.row / rows_of_tiles(a.product.dtype), n, tile.column);
  for (int i = 0; i < tile.rows; ++i) {
    const auto* sums = static_cast<const Acc<T>*>(tile.sums) + i * tile.stride;
    const T* kept = at<T>(a.preactivation, tile.row + i, n, tile.column);
    T* grad = at<T>(a.grad_preactivation, tile.row + i, n, tile.column);
    T* hidden = at<T>(a.hidden, tile.row + i, n, tile.column);
    for_each_vector<V::size()>(tile.columns, [&](int64_t c, int64_t count, auto full) {
      const V sum = load_vec(sums + c, count, full);
      V dz = sum;
      if constexpr (A != Activation::identity) {
        const V z = load_vec(kept + c, count, full);
        dz = with_slope<A>(sum, slope<T, A>(z), z);
        if (hidden != nullptr) store_vec(hidden + c, activated<T, A>(z), count, full);
      } else if (hidden != nullptr) {
        store_vec(hidden + c, load_vec(kept + c, count, full), count, full);
      }
      if (grad != nullptr) store_vec(grad + c, dz, count, full);
      if (partial != nullptr) {
        if (i > 0) dz = dz + load_vec(partial + c, count, full);
        store_vec(partial + c, dz, count, full);
      }
    });
  }
}

// One row of the gradient; `partial` receives its part of the bias gradient, when not null.
template <typename T, Activation A>
inline void gradient_row(const T* dy, const T* kept, T* grad, Acc<T>* partial, int64_t columns) {
  using V = Vec<T>;
  for_each_vector<V::size()>(columns, [&](int64_t c, int64_t count, auto full) {
    V dz = load_vec(dy + c, count, full);
    if constexpr (A != Activation::identity) {
      const V z = load_vec(kept + c, count, full);
      dz = with_slope<A>(dz, slope<T, A>(z), z);
    }
    if (grad != nullptr) store_vec(grad + c, dz, count, full);
    if (partial != nullptr) {
      store_vec(partial + c, dz + load_vec(partial + c, count, full), count, full);
    }
  });
}

template <typename T, Activation A>
void gradient(const ActivationGradient& a) {
  using S = Acc<T>;
  const int64_t n = a.columns;
  const int64_t row_bytes = 3 * n * static_cast<int64_t>(sizeof(T));
  const auto run = [&](int64_t begin, int64_t end, S* partial) {
    for (int64_t row = begin; row < end; ++row) {
      gradient_row<T, A>(at<T>(a.grad_output, row, n, 0), at<T>(a.preactivation, row, n, 0),
                         at<T>(a.grad_preactivation, row, n, 0), partial, n);
    }
  };
  if (a.grad_bias == nullptr) {
    parallel_rows(a.rows, row_bytes, [&](int64_t begin, int64_t end) { run(begin, end, nullptr); });
    return;
  }
  const Chunks chunks(a.rows);
  auto* partials = static_cast<S*>(a.partials);
  parallel_rows(chunks.count, row_bytes * chunks.rows_per_chunk, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      S* partial = partials + chunk * n;
      std::fill(partial, partial + n, S(0));
      run(chunks.begin(chunk), chunks.end(chunk), partial);
    }
  });
  sum_partials(partials, chunks.count, n, n, static_cast<T*>(a.grad_bias));
}

}  // namespace

void linear_forward(const LinearForward& a) {
  GemmCall product = a.product;
  product.context = &a;
  product.touched[0] = {a.output, product.n};
  product.touched[1] = {a.preactivation, product.n};
  with_types(product.dtype, a.activation, [&](auto t, auto tag) {
    product.store = store_forward<decltype(t), decltype(tag)::value>;
  });
  gemm(product);
}

void linear_forward_batch(const LinearForward* products, int64_t count) {
  if (count == 0) return;
  std::vector<GemmCall> calls;
  with_types(products[0].product.dtype, products[0].activation, [&](auto t, auto tag) {
    for (int64_t i = 0; i < count; ++i) {
      calls.push_back(products[i].product);
      calls.back().context = products + i;
      calls.back().store = store_forward<decltype(t), decltype(tag)::value>;
    }
  });
  gemm_batch(calls.data(), count);
}

void hidden_gradient(const HiddenGradient& a) {
  GemmCall product = a.product;
  product.context = &a;
  product.touched[0] = {a.preactivation, product.n};
  product.touched[1] = {a.grad_preactivation, product.n};
  product.touched[2] = {a.hidden, product.n};
  with_types(product.dtype, a.activation, [&](auto t, auto tag) {
    product.store = store_hidden_gradient<decltype(t), decltype(tag)::value>;
  });
  gemm(product);
  if (a.grad_bias == nullptr) return;
  switch_dtype(product.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t n = product.n;
    sum_partials(static_cast<const Acc<T>*>(a.partials),
                 ceil_div(product.m, rows_of_tiles(product.dtype)), n, n,
                 static_cast<T*>(a.grad_bias));
  });
}

void activation_gradient(const ActivationGradient& a) {
  with_types(a.dtype, a.activation,
             [&](auto t, auto tag) { gradient<decltype(t), decltype(tag)::value>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
