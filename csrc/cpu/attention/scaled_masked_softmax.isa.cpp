// scaled_masked_softmax on the CPU: y = softmax(scale * x + mask) of each row.
//
// Forward: a row is widened with scale and mask into a scratch row that stays in the cache, and
// walked there: maximum, exponentials and their sum, quotients. Traffic: x and the mask once in,
// y once out; of a causal row only the part that counts is read. Rows that share a row of the mask
// are taken one after the other, so that it is read from memory once.
//
// Backward, with s = sum(dy * y) / sum(y):  dx = scale * y * (dy - s),  dmask = sum of y * (dy - s)
// over the rows that share a row of the mask. sum(y) is 1 but for the rounding of y to half
// precision: without it that rounding would count times dy, not times dy - s. Those are cut into
// chunks by their number alone and the parts added in order: the same bits for any number of
// threads.
//
// A row in which nothing is left has y = 0, and so dx = 0.
#include "scaled_masked_softmax.h"

#include <algorithm>
#include <limits>

#include "../../common/parallel.h"
#include "../common/exp2_vec.h"
#include "../common/scratch.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

// Where a row lies and where its mask does.
struct Place {
  int64_t row;
  int64_t mask;
};

inline Place place_of(const SoftmaxRows& rows, int64_t index) {
  Place place{0, 0};
  for (int d = rows.dims - 1; d >= 0; --d) {
    const int64_t i = index % rows.sizes[d];
    index /= rows.sizes[d];
    place.row += i * rows.row_strides[d];
    place.mask += i * rows.mask_strides[d];
  }
  return place;
}

// Columns of a row that causality leaves.
inline int64_t visible(bool is_causal, int64_t row, int64_t queries, int64_t columns) {
  return is_causal ? std::min(columns, row % queries + 1) : columns;
}

// `scores` where the mask says true, -inf elsewhere.
template <typename A>
inline at::vec::Vectorized<A> keep_where(const bool* mask, const at::vec::Vectorized<A>& scores,
                                         int64_t count) {
  using V = at::vec::Vectorized<A>;
#if defined(CPU_CAPABILITY_AVX512)
  const auto valid = static_cast<__mmask16>((uint32_t{1} << count) - 1);
  const __m128i bytes = _mm_maskz_loadu_epi8(valid, mask);
  const __mmask16 kept = _mm_test_epi8_mask(bytes, bytes);
  const V none(-std::numeric_limits<A>::infinity());
  if constexpr (std::is_same_v<A, float>)
    return _mm512_mask_mov_ps(none, kept, scores);
  else
    return _mm512_mask_mov_pd(none, static_cast<__mmask8>(kept), scores);
#else
  A values[V::size()];
  scores.store(values);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = mask[i] ? values[i] : -std::numeric_limits<A>::infinity();
  }
  return V::loadu(values);
#endif
}

template <typename T>
inline void fill(bool stream, T* to, int64_t begin, int64_t end, Acc<T> value) {
  // From a multiple of the vectors that are streamed.
  constexpr int64_t kWidth = Vec<T>::size();
  const int64_t aligned = std::min(end, (begin + kWidth - 1) / kWidth * kWidth);
  std::fill(to + begin, to + aligned, static_cast<T>(value));
  for_each_vector<kWidth>(end - aligned, [&](int64_t c, int64_t count, auto full) {
    store_or_stream(stream, to + aligned + c, Vec<T>(value), count, full);
  });
}

// M is the type of the mask: void, bool, or that of an additive one.
template <typename T, typename M>
void forward(const ScaledMaskedSoftmaxForward& a) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  const bool stream = should_stream(static_cast<const T*>(a.output), a.rows.count, a.columns);
  const V scale(static_cast<A>(a.scale));
  parallel_rows(a.rows.count, 3 * a.columns * sizeof(T), [&](int64_t begin, int64_t end) {
    Scratch<A> scratch(a.columns);
    for (int64_t index = begin; index < end; ++index) {
      const Place place = place_of(a.rows, index);
      const T* x = static_cast<const T*>(a.input) + place.row * a.columns;
      T* y = static_cast<T*>(a.output) + place.row * a.columns;
      int64_t columns = visible(a.is_causal, place.row, a.queries, a.columns);
      A shift(0);
      if constexpr (!std::is_void_v<M>) {
        const M* mask = static_cast<const M*>(a.mask) + place.mask;
        if constexpr (std::is_same_v<M, bool>) {
          if (a.mask_is_per_row && !*mask) columns = 0;
        } else {
          if (a.mask_is_per_row) shift = static_cast<A>(*mask);
        }
      }
      const V shifts(shift);
      // Two maxima hide the latency.
      V highest[2] = {V(kNone), V(kNone)};
      int turn = 0;
      for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
        // One rounding of product and mask, whether the mask is one number for the row or many.
        V added = shifts;
        if constexpr (!std::is_void_v<M> && !std::is_same_v<M, bool>) {
          const M* mask = static_cast<const M*>(a.mask) + place.mask + c;
          if (!a.mask_is_per_row) added = load_vec(mask, count, full);
        }
        V scores = at::vec::fmadd(load_vec(x + c, count, full), scale, added);
        if constexpr (std::is_same_v<M, bool>) {
          if (!a.mask_is_per_row) {
            scores = keep_where(static_cast<const bool*>(a.mask) + place.mask + c, scores, count);
          }
        }
        if constexpr (!decltype(full)::value) scores = V::set(V(kNone), scores, count);
        store_vec(scratch.data() + c, scores, count, full);
        highest[turn] = at::vec::maximum(highest[turn], scores);
        turn ^= 1;
      });
      const A peak =
          at::vec::vec_reduce_all<A>([](const V& p, const V& q) { return at::vec::maximum(p, q); },
                                     at::vec::maximum(highest[0], highest[1]));
      if (peak == kNone) {
        fill(stream, y, 0, a.columns, A(0));
        continue;
      }
      const V peaks(peak);
      V sums[2] = {V(A(0)), V(A(0))};
      for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
        V e = exp_of<T>(load_vec(scratch.data() + c, count, full) - peaks);
        if constexpr (!decltype(full)::value) e = V::set(V(A(0)), e, count);
        store_vec(scratch.data() + c, e, count, full);
        sums[turn] = sums[turn] + e;
        turn ^= 1;
      });
      const A inverse = A(1) / sum_lanes(sums[0] + sums[1]);
      for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
        const V value = load_vec(scratch.data() + c, count, full) * V(inverse);
        store_or_stream(stream, y + c, value, count, full);
      });
      // Their exponentials are 0, or NaN as those of the whole row.
      if (columns < a.columns) fill(stream, y, columns, a.columns, A(0) * inverse);
    }
  });
}

// One row: dx when it is wanted, and y * (dy - s) added to dmask.
template <typename T>
inline void backward_row(const ScaledMaskedSoftmaxBackward& a, bool stream, int64_t row,
                         Acc<T>* dmask) {
  using A = Acc<T>;
  using V = Vec<T>;
  constexpr int W = V::size();
  const T* dy = static_cast<const T*>(a.grad_output) + row * a.columns;
  const T* y = static_cast<const T*>(a.output) + row * a.columns;
  const int64_t columns = visible(a.is_causal, row, a.queries, a.columns);
  V products[2] = {V(A(0)), V(A(0))};
  V values[2] = {V(A(0)), V(A(0))};
  int turn = 0;
  for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
    const V value = load_vec(y + c, count, full);
    products[turn] = at::vec::fmadd(value, load_vec(dy + c, count, full), products[turn]);
    values[turn] = values[turn] + value;
    turn ^= 1;
  });
  const A total = sum_lanes(values[0] + values[1]);
  const V along(sum_lanes(products[0] + products[1]) / (total == A(0) ? A(1) : total));
  const V scale(static_cast<A>(a.scale));
  T* dx = a.grad_input != nullptr ? static_cast<T*>(a.grad_input) + row * a.columns : nullptr;
  for_each_vector<W>(columns, [&](int64_t c, int64_t count, auto full) {
    const V value = load_vec(y + c, count, full);
    const V beyond = load_vec(dy + c, count, full) - along;
    if (dx != nullptr) store_or_stream(stream, dx + c, value * beyond * scale, count, full);
    if (dmask != nullptr) {
      // Fused in the source: the compiler would fuse it only where dx is not wanted.
      const V sum = at::vec::fmadd(value, beyond, load_vec(dmask + c, count, full));
      store_vec(dmask + c, sum, count, full);
    }
  });
  if (dx != nullptr && columns < a.columns) fill(stream, dx, columns, a.columns, A(0));
}

template <typename T, typename M>
void backward(const ScaledMaskedSoftmaxBackward& a) {
  using A = Acc<T>;
  static_assert(std::is_same_v<A, Acc<M>>);
  const bool stream = should_stream(static_cast<const T*>(a.grad_input), a.rows.count, a.columns);
  const int64_t bytes = 3 * a.columns * sizeof(T);
  if (a.grad_mask == nullptr) {
    parallel_rows(a.rows.count, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) backward_row<T>(a, stream, row, nullptr);
    });
    return;
  }
  const Chunks chunks(a.rows.sharing);
  const int64_t groups = a.rows.count / a.rows.sharing;
  const int64_t rows_per_task = std::min(a.rows.sharing, chunks.rows_per_chunk);
  parallel_rows(groups * chunks.count, bytes * rows_per_task, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch(a.partials == nullptr ? a.columns : 0);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / chunks.count, chunk = task % chunks.count;
      A* dmask =
          a.partials == nullptr ? scratch.data() : static_cast<A*>(a.partials) + task * a.columns;
      std::fill(dmask, dmask + a.columns, A(0));
      for (int64_t i = chunks.begin(chunk); i < chunks.end(chunk); ++i) {
        backward_row<T>(a, stream, place_of(a.rows, group * a.rows.sharing + i).row, dmask);
      }
      if (a.partials == nullptr) {
        sum_partials(dmask, 1, a.columns, a.columns,
                     static_cast<M*>(a.grad_mask) + group * a.columns);
      }
    }
  });
  if (a.partials == nullptr) return;
  parallel_rows(groups, bytes * chunks.count, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      sum_partials(static_cast<const A*>(a.partials) + group * chunks.count * a.columns,
                   chunks.count, a.columns, a.columns,
                   static_cast<M*>(a.grad_mask) + group * a.columns);
    }
  });
}

}  // namespace

void scaled_masked_softmax_forward(const ScaledMaskedSoftmaxForward& a) {
  switch (a.mask_kind) {
    case MaskKind::none:
      return switch_dtype(a.dtype, [&](auto t) { forward<decltype(t), void>(a); });
    case MaskKind::keep:
      return switch_dtype(a.dtype, [&](auto t) { forward<decltype(t), bool>(a); });
    case MaskKind::additive:
      return switch_dtypes(a.dtype, a.mask_dtype,
                           [&](auto t, auto m) { forward<decltype(t), decltype(m)>(a); });
  }
}

void scaled_masked_softmax_backward(const ScaledMaskedSoftmaxBackward& a) {
  switch_dtypes(a.dtype, a.mask_dtype,
                [&](auto t, auto m) { backward<decltype(t), decltype(m)>(a); });
}

}  // namespace fusedops::CPU_CAPABILITY
