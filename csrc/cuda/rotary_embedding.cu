// rotary_embedding on CUDA. The formula is that of csrc/cpu/attention/rotary_embedding.isa.cpp:
// y[j] = x[j] * cos[j] + x[j'] * f[j], j' the partner of j in its pair.
//
// A block works at one position of one batch entry. A thread keeps the cos and f of its pairs in
// registers and walks the heads of query and key with them: 16 bytes of each half of a head, or 16
// bytes of neighbouring pairs when interleaved. Traffic: query and key once in, once out.
//
// No figure here is measured yet; registers and spills are in docs/reports/cuda_kernels.csv.
#include "rotary_embedding.h"

#include <algorithm>

#include "launch.cuh"

namespace fusedops::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct Heads {
  const T* input;
  T* output;
  int64_t heads;
  int64_t in[3];
  int64_t out[3];
};

template <typename T, typename P>
struct Rotation {
  Heads<T> tensors[2];
  const P* cos;
  const P* sin;
  int64_t cos_strides[2];
  int64_t sin_strides[2];
  int64_t positions;  // of all batch entries
  int64_t length;
  int head_dim;
  int rotary_dim;
  bool inverse;
};

// kPack elements by one access, or one by one where the addresses are not aligned for that.
template <bool kVector, typename T, int kPack, typename A>
__device__ __forceinline__ void load_elements(const T* pointer, A (&values)[kPack]) {
  if constexpr (kVector) {
    load(pointer, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = widen<A>(pointer[i]);
  }
}

template <bool kVector, typename T, int kPack, typename A>
__device__ __forceinline__ void store_elements(T* pointer, const A (&values)[kPack]) {
  if constexpr (kVector) {
    store(pointer, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) pointer[i] = narrow<T>(values[i]);
  }
}

// The pairs of a thread: first elements at `low`, second ones at `high`; interleaved, 2 * kPairs
// neighbours at `low`, of which the even ones are first.
template <bool kInterleaved, bool kVector, typename T, int kPairs, typename A>
__device__ __forceinline__ void load_pairs(const T* low, const T* high, A (&first)[kPairs],
                                           A (&second)[kPairs]) {
  if constexpr (kInterleaved) {
    A both[2 * kPairs];
    load_elements<kVector>(low, both);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      first[i] = both[2 * i];
      second[i] = both[2 * i + 1];
    }
  } else {
    load_elements<kVector>(low, first);
    load_elements<kVector>(high, second);
  }
}

template <bool kInterleaved, bool kVector, typename T, int kPairs, typename A>
__device__ __forceinline__ void store_pairs(T* low, T* high, const A (&first)[kPairs],
                                            const A (&second)[kPairs]) {
  if constexpr (kInterleaved) {
    A both[2 * kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      both[2 * i] = first[i];
      both[2 * i + 1] = second[i];
    }
    store_elements<kVector>(low, both);
  } else {
    store_elements<kVector>(low, first);
    store_elements<kVector>(high, second);
  }
}

// Block: threads of a head by heads.
template <typename T, typename P, int kPairs, bool kInterleaved, bool kVector>
__global__ void __launch_bounds__(kThreads, 3) rotate_kernel(const Rotation<T, P> a) {
  using A = Acc<T>;
  const int64_t position = blockIdx.x;
  const int64_t entry = position / a.length;
  const int64_t place = position % a.length;
  const P* cos = a.cos + entry * a.cos_strides[0] + place * a.cos_strides[1];
  const P* sin = a.sin + entry * a.sin_strides[0] + place * a.sin_strides[1];
  const int half = a.rotary_dim / 2;
  const int step = static_cast<int>(blockDim.x) * kPairs;
  for (int pair = static_cast<int>(threadIdx.x) * kPairs; pair < half; pair += step) {
    const int low = kInterleaved ? 2 * pair : pair;
    const int high = half + pair;
    A cos_first[kPairs], cos_second[kPairs], to_first[kPairs], to_second[kPairs];
    load_pairs<kInterleaved, kVector>(cos + low, cos + high, cos_first, cos_second);
    load_pairs<kInterleaved, kVector>(sin + low, sin + high, to_first, to_second);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const A s1 = to_first[i];
      const A s2 = to_second[i];
      to_first[i] = a.inverse ? s2 : -s1;
      to_second[i] = a.inverse ? -s1 : s2;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Heads<T>& t = a.tensors[k];
      const T* input = t.input + entry * t.in[0] + place * t.in[2];
      T* output = t.output + entry * t.out[0] + place * t.out[2];
      for (int64_t head = threadIdx.y; head < t.heads; head += blockDim.y) {
        const T* x = input + head * t.in[1];
        T* y = output + head * t.out[1];
        A first[kPairs], second[kPairs];
        load_pairs<kInterleaved, kVector>(x + low, x + high, first, second);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const A x1 = first[i];
          first[i] = x1 * cos_first[i] + second[i] * to_first[i];
          second[i] = second[i] * cos_second[i] + x1 * to_second[i];
        }
        store_pairs<kInterleaved, kVector>(y + low, y + high, first, second);
      }
    }
  }
  if (a.rotary_dim == a.head_dim) return;
  constexpr int kPack = kInterleaved ? 2 * kPairs : kPairs;
  const int pass_step = static_cast<int>(blockDim.x) * kPack;
  for (int k = 0; k < 2; ++k) {
    const Heads<T>& t = a.tensors[k];
    const T* input = t.input + entry * t.in[0] + place * t.in[2];
    T* output = t.output + entry * t.out[0] + place * t.out[2];
    for (int64_t head = threadIdx.y; head < t.heads; head += blockDim.y) {
      int column = a.rotary_dim + static_cast<int>(threadIdx.x) * kPack;
      for (; column < a.head_dim; column += pass_step) {
        const T* x = input + head * t.in[1] + column;
        T* y = output + head * t.out[1] + column;
        if (kVector || column + kPack <= a.head_dim) {
          A values[kPack];
          load_elements<kVector>(x, values);
          store_elements<kVector>(y, values);
        } else {
          *y = *x;  // kPack is 2 here, and one element is left
        }
      }
    }
  }
}

template <typename T, typename P, int kPairs, bool kInterleaved, bool kVector>
cudaError_t launch(const Rotation<T, P>& a, cudaStream_t stream) {
  const int64_t wanted = (a.rotary_dim / 2 + kPairs - 1) / kPairs;
  const auto x = static_cast<unsigned>(std::min<int64_t>(wanted, kThreads));
  const int64_t heads = std::max(a.tensors[0].heads, a.tensors[1].heads);
  const auto y = static_cast<unsigned>(std::min<int64_t>(heads, kThreads / x));
  return enqueue(rotate_kernel<T, P, kPairs, kInterleaved, kVector>,
                 static_cast<unsigned>(a.positions), dim3(x, y), 0, stream, a);
}

template <typename T>
Heads<T> heads_of(const RotaryHeads& t) {
  const bool wanted = t.input != nullptr;
  return {static_cast<const T*>(t.input),
          static_cast<T*>(t.output),
          wanted ? t.heads : 0,
          {t.input_strides[0], t.input_strides[1], t.input_strides[2]},
          {t.output_strides[0], t.output_strides[1], t.output_strides[2]}};
}

// Whether all addresses of the data and of the tables are multiples of a pack's bytes.
template <typename T, typename P>
bool packs_fit(const Rotation<T, P>& a, int64_t pack, int64_t unit) {
  bool fits = aligned(a.cos) && aligned(a.sin) && unit % pack == 0 && a.head_dim % pack == 0;
  for (int i = 0; i < 2; ++i) {
    fits = fits && a.cos_strides[i] % pack == 0 && a.sin_strides[i] % pack == 0;
  }
  for (const Heads<T>& t : a.tensors) {
    if (t.input == nullptr) continue;
    fits = fits && aligned(t.input) && aligned(t.output);
    for (int i = 0; i < 3; ++i) fits = fits && t.in[i] % pack == 0 && t.out[i] % pack == 0;
  }
  return fits;
}

}  // namespace

cudaError_t rotary_embedding(const RotaryEmbedding& given, cudaStream_t stream) {
  return switch_types(given.dtype, given.table_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    const Rotation<T, P> a{{heads_of<T>(given.tensors[0]), heads_of<T>(given.tensors[1])},
                           static_cast<const P*>(given.cos),
                           static_cast<const P*>(given.sin),
                           {given.cos_strides[0], given.cos_strides[1]},
                           {given.sin_strides[0], given.sin_strides[1]},
                           given.batch * given.length,
                           given.length,
                           static_cast<int>(given.head_dim),
                           static_cast<int>(given.rotary_dim),
                           given.inverse};
    constexpr int kPack = kPackOf<T>;
    if (given.interleaved) {
      return packs_fit(a, kPack, a.rotary_dim) ? launch<T, P, kPack / 2, true, true>(a, stream)
                                               : launch<T, P, 1, true, false>(a, stream);
    }
    return packs_fit(a, kPack, a.rotary_dim / 2) ? launch<T, P, kPack, false, true>(a, stream)
                                                 : launch<T, P, 1, false, false>(a, stream);
  });
}

}  // namespace fusedops::cuda
