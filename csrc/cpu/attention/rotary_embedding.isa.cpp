// rotary_embedding on the CPU: the first rotary_dim elements of each head turn in pairs, the others
// are copied. With j' the partner of j in its pair (j +- rotary_dim/2, or j ^ 1 interleaved),
//
//   y[j] = x[j] * cos[j] + x[j'] * f[j]     f[j] = -sin[j] for the first of a pair, sin[j] for the
//                                           second; transposed: sin[j'] and -sin[j']
//
// Traffic: query and key once in, once out. A task is a few positions of one batch entry with all
// their heads; it widens cos and f once, 16 KB that stay in L1, and walks the heads in the order in
// which they lie in memory, so that [B, S, H, D] seen as [B, H, S, D] is no worse than a dense
// [B, H, S, D]. Outputs larger than the cache are streamed around it.
#include "rotary_embedding.h"

#include <algorithm>

#include "../../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr int64_t kPositions = 16;  // of one task

// Lanes 1 0 3 2 ...
template <typename A>
inline at::vec::Vectorized<A> swap_pairs(const at::vec::Vectorized<A>& vector) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<A, float>)
    return _mm512_permute_ps(vector, 0xB1);
  else
    return _mm512_permute_pd(vector, 0x55);
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<A, float>)
    return _mm256_permute_ps(vector, 0xB1);
  else
    return _mm256_permute_pd(vector, 0x5);
#else
  A values[at::vec::Vectorized<A>::size()];
  vector.store(values);
  for (int i = 0; i < at::vec::Vectorized<A>::size(); i += 2) std::swap(values[i], values[i + 1]);
  return at::vec::Vectorized<A>::loadu(values);
#endif
}

// cos and f of one position, widened.
template <typename P>
inline void prepare(const RotaryEmbedding& a, int64_t entry, int64_t position, Acc<P>* cosine,
                    Acc<P>* factor) {
  using A = Acc<P>;
  using V = Vec<P>;
  const P* cos =
      static_cast<const P*>(a.cos) + entry * a.cos_strides[0] + position * a.cos_strides[1];
  const P* sin =
      static_cast<const P*>(a.sin) + entry * a.sin_strides[0] + position * a.sin_strides[1];
  for_each_vector<V::size()>(a.rotary_dim, [&](int64_t c, int64_t count, auto full) {
    store_vec(cosine + c, load_vec(cos + c, count, full), count, full);
  });
  if (a.interleaved) {
    A signs[V::size()];
    for (int i = 0; i < V::size(); ++i) signs[i] = (i % 2 == 0) == a.inverse ? A(1) : A(-1);
    const V sign = V::loadu(signs);
    for_each_vector<V::size()>(a.rotary_dim, [&](int64_t c, int64_t count, auto full) {
      const V s = load_vec(sin + c, count, full);
      store_vec(factor + c, sign * (a.inverse ? swap_pairs(s) : s), count, full);
    });
    return;
  }
  const int64_t half = a.rotary_dim / 2;
  const P* first = a.inverse ? sin + half : sin;
  const P* second = a.inverse ? sin : sin + half;
  const V one(A(1)), minus_one(A(-1));
  const V sign = a.inverse ? one : minus_one;
  for_each_vector<V::size()>(half, [&](int64_t c, int64_t count, auto full) {
    store_vec(factor + c, sign * load_vec(first + c, count, full), count, full);
    store_vec(factor + half + c, minus_one * sign * load_vec(second + c, count, full), count, full);
  });
}

// One head at one position.
template <typename T, bool kInterleaved>
inline void rotate(bool stream, const T* x, T* y, const Acc<T>* cosine, const Acc<T>* factor,
                   int64_t rotary_dim, int64_t head_dim) {
  using V = Vec<T>;
  if constexpr (kInterleaved) {
    for_each_vector<V::size()>(rotary_dim, [&](int64_t c, int64_t count, auto full) {
      const V here = load_vec(x + c, count, full);
      const V turned = swap_pairs(here) * load_vec(factor + c, count, full);
      store_or_stream(stream, y + c,
                      at::vec::fmadd(here, load_vec(cosine + c, count, full), turned), count, full);
    });
  } else {
    const int64_t half = rotary_dim / 2;
    for_each_vector<V::size()>(half, [&](int64_t c, int64_t count, auto full) {
      const V low = load_vec(x + c, count, full);
      const V high = load_vec(x + half + c, count, full);
      const V to_low = high * load_vec(factor + c, count, full);
      const V to_high = low * load_vec(factor + half + c, count, full);
      store_or_stream(stream, y + c, at::vec::fmadd(low, load_vec(cosine + c, count, full), to_low),
                      count, full);
      store_or_stream(stream, y + half + c,
                      at::vec::fmadd(high, load_vec(cosine + half + c, count, full), to_high),
                      count, full);
    });
  }
  for_each_vector<V::size()>(head_dim - rotary_dim, [&](int64_t c, int64_t count, auto full) {
    const int64_t column = rotary_dim + c;
    store_or_stream(stream, y + column, load_vec(x + column, count, full), count, full);
  });
}

// Whether every part of every row of the output may be streamed, and is worth it.
template <typename T>
bool streams(const RotaryEmbedding& a, const RotaryHeads& t) {
  const auto whole = [](int64_t elements) { return elements * sizeof(T) % 64 == 0; };
  return should_stream(static_cast<const T*>(t.output), a.batch * t.heads * a.length, a.head_dim) &&
         whole(a.interleaved ? a.rotary_dim : a.rotary_dim / 2) && whole(t.output_strides[0]) &&
         whole(t.output_strides[1]) && whole(t.output_strides[2]);
}

template <typename T, bool kInterleaved>
void rotate_positions(const RotaryEmbedding& a, const RotaryHeads& t, bool stream, int64_t entry,
                      int64_t first, int64_t count, const Acc<T>* tables) {
  const auto head = [&](int64_t h, int64_t i) {
    const T* x = static_cast<const T*>(t.input) + entry * t.input_strides[0] +
                 h * t.input_strides[1] + (first + i) * t.input_strides[2];
    T* y = static_cast<T*>(t.output) + entry * t.output_strides[0] + h * t.output_strides[1] +
           (first + i) * t.output_strides[2];
    const Acc<T>* cosine = tables + 2 * i * a.rotary_dim;
    rotate<T, kInterleaved>(stream, x, y, cosine, cosine + a.rotary_dim, a.rotary_dim, a.head_dim);
  };
  if (t.input_strides[1] >= t.input_strides[2]) {
    for (int64_t h = 0; h < t.heads; ++h) {
      for (int64_t i = 0; i < count; ++i) head(h, i);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t h = 0; h < t.heads; ++h) head(h, i);
    }
  }
}

template <typename T, typename P, bool kInterleaved>
void run(const RotaryEmbedding& a) {
  static_assert(std::is_same_v<Acc<T>, Acc<P>>);
  const bool stream[2] = {streams<T>(a, a.tensors[0]), streams<T>(a, a.tensors[1])};
  const int64_t heads = a.tensors[0].heads + a.tensors[1].heads;
  const int64_t positions = std::min(kPositions, a.length);
  const int64_t blocks = (a.length + positions - 1) / positions;
  const int64_t bytes = 2 * positions * heads * a.head_dim * sizeof(T);
  parallel_rows(a.batch * blocks, bytes, [&](int64_t begin, int64_t end) {
    Scratch<Acc<T>> tables(2 * positions * a.rotary_dim);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t entry = task / blocks;
      const int64_t first = task % blocks * positions;
      const int64_t count = std::min(positions, a.length - first);
      for (int64_t i = 0; i < count; ++i) {
        Acc<T>* cosine = tables.data() + 2 * i * a.rotary_dim;
        prepare<P>(a, entry, first + i, cosine, cosine + a.rotary_dim);
      }
      for (int k = 0; k < 2; ++k) {
        if (a.tensors[k].input == nullptr) continue;
        rotate_positions<T, kInterleaved>(a, a.tensors[k], stream[k], entry, first, count,
                                          tables.data());
      }
    }
  });
}

}  // namespace

void rotary_embedding(const RotaryEmbedding& a) {
  switch_dtypes(a.dtype, a.table_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    if (a.interleaved) {
      run<T, P, true>(a);
    } else {
      run<T, P, false>(a);
    }
  });
}

}  // namespace fusedops::CPU_CAPABILITY
