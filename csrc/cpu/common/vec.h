// Loads and stores between memory of any supported dtype and vectors of its accumulation type:
// float for float32 and half precision, double for float64. Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../../common/dtype.h"
#include "../../common/isa.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T>
using Vec = at::vec::Vectorized<Acc<T>>;

#if defined(CPU_CAPABILITY_AVX512)
// Rounds to nearest even. The instruction is written in assembly because the AVX512 build is for
// processors without it too; it takes subnormal numbers (below 1.2e-38) for zero. Without
// `volatile`, g++ moves the rounding of what does not change out of a loop, and ahead of the
// question whether the processor has the instruction.
inline __m256i round_to_bf16(__m512 values) {
  if (__builtin_expect(kHasAvx512Bf16, 1)) {
    __m256i rounded;
    asm volatile("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(values));
    return rounded;
  }
  return at::vec::cvtfp32_bf16(values);
}
#endif

#if defined(CPU_CAPABILITY_AVX512)
// bfloat16 to float: each half-word to the upper half of its lane, in one permutation. at::vec
// takes two instructions; on two Zen 5 cores 1.5 instead of 2.0 cycles a vector.
inline __m512 widen_bf16(__m256i halves) {
  const __m512i lanes = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8,
                                         7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_castsi512_ps(
      _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, _mm512_castsi256_si512(halves)));
}
#endif

// A vector of half precision T (or eight) to float and back, rounded to nearest even. float16 keeps
// its subnormal numbers, and is inf from 65520 on.
#if defined(CPU_CAPABILITY_AVX512)
template <typename T>
inline __m512 widen(__m256i halves) {
  static_assert(kIsHalf<T>);
  if constexpr (std::is_same_v<T, c10::Half>) return _mm512_cvtph_ps(halves);
  return widen_bf16(halves);
}

template <typename T>
inline __m256i round_to(__m512 values) {
  static_assert(kIsHalf<T>);
  if constexpr (std::is_same_v<T, c10::Half>) {
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  return round_to_bf16(values);
}
#elif defined(CPU_CAPABILITY_AVX2)
template <typename T>
inline __m256 widen(__m128i halves) {
  static_assert(kIsHalf<T>);
  if constexpr (std::is_same_v<T, c10::Half>) return _mm256_cvtph_ps(halves);
  __m256 values;
  at::vec::cvtbf16_fp32(halves, values);
  return values;
}

template <typename T>
inline __m128i round_to(__m256 values) {
  static_assert(kIsHalf<T>);
  if constexpr (std::is_same_v<T, c10::Half>) {
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  return at::vec::cvtfp32_bf16(values);
}
#endif

// Elements 0..count-1 from memory, the others zero.
#if defined(CPU_CAPABILITY_AVX512)
template <typename T>
inline Vec<T> load_vec(const T* from, int64_t count) {
  const uint32_t lanes = (uint32_t{1} << count) - 1;
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes), from);
  } else if constexpr (std::is_same_v<T, double>) {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes), from);
  } else {
    return widen<T>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(lanes), from));
  }
}
#else
// Not inlined: an unrolled loop at each end of a row was most of the code.
template <typename T>
__attribute__((noinline)) Vec<T> load_vec(const T* from, int64_t count) {
  Acc<T> values[Vec<T>::size()] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<Acc<T>>(from[i]);
  return Vec<T>::loadu(values);
}
#endif

template <typename T>
inline Vec<T> load_vec(const T* from) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return Vec<T>::loadu(from);
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    return widen<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
    return widen<T>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    return load_vec(from, Vec<T>::size());
#endif
  }
}

#if defined(CPU_CAPABILITY_AVX512)
template <typename T>
inline void store_vec(T* to, const Vec<T>& vector, int64_t count) {
  const uint32_t lanes = (uint32_t{1} << count) - 1;
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(lanes), vector);
  } else if constexpr (std::is_same_v<T, double>) {
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>(lanes), vector);
  } else {
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(lanes), round_to<T>(vector));
  }
}
#else
template <typename T>
__attribute__((noinline)) void store_vec(T* to, const Vec<T>& vector, int64_t count) {
  Acc<T> values[Vec<T>::size()];
  vector.store(values);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);
}
#endif

template <typename T>
inline void store_vec(T* to, const Vec<T>& vector) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    vector.store(to);
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_to<T>(vector));
#elif defined(CPU_CAPABILITY_AVX2)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), round_to<T>(vector));
#else
    store_vec(to, vector, Vec<T>::size());
#endif
  }
}

// Writes around the cache: for outputs that are larger than it, where the read for ownership of an
// ordinary store would cost a third of the traffic. `to` must be aligned to the vector's bytes.
template <typename T>
inline void stream_vec(T* to, const Vec<T>& vector) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>) return _mm512_stream_ps(to, vector);
  if constexpr (std::is_same_v<T, double>) return _mm512_stream_pd(to, vector);
  if constexpr (kIsHalf<T>) {
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), round_to<T>(vector));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) return _mm256_stream_ps(to, vector);
  if constexpr (std::is_same_v<T, double>) return _mm256_stream_pd(to, vector);
  if constexpr (kIsHalf<T>) {
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), round_to<T>(vector));
  }
#endif
  store_vec(to, vector);
}

// How many elements ahead of a row its memory is asked for while it is written: hardware does not
// foresee several short streams, and asks for nothing while rows are computed from cache.
template <typename T>
inline int64_t prefetch_distance(int64_t columns) {
  return std::max<int64_t>(columns, 8192 / sizeof(T));
}

// Whether rows of `columns` elements at `to` may be streamed, and are worth it: above this many
// bytes the output does not stay in the cache for its reader anyway.
inline constexpr int64_t kStreamBytes = 16 << 20;

template <typename T>
inline bool should_stream(const T* to, int64_t rows, int64_t columns) {
  return rows * columns * static_cast<int64_t>(sizeof(T)) >= kStreamBytes &&
         reinterpret_cast<uintptr_t>(to) % 64 == 0 && columns * sizeof(T) % 64 == 0;
}

// The sum of the lanes, in a fixed order. In registers: through memory it took 100 cycles.
template <typename A>
inline A sum_lanes(const at::vec::Vectorized<A>& vector) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<A, float>)
    return _mm512_reduce_add_ps(vector);
  else
    return _mm512_reduce_add_pd(vector);
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<A, float>) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(vector), _mm256_extractf128_ps(vector, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  } else {
    const __m128d sum =
        _mm_add_pd(_mm256_castpd256_pd128(vector), _mm256_extractf128_pd(vector, 1));
    return _mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum)));
  }
#else
  A values[at::vec::Vectorized<A>::size()];
  vector.store(values);
  A sum = values[0];
  for (int i = 1; i < at::vec::Vectorized<A>::size(); ++i) sum += values[i];
  return sum;
#endif
}

// Calls body(column, count) over the vectors of a row; count is the number of valid lanes.
// `body` receives a std::true_type when the vector is full, so that it compiles to plain loads.
template <int kWidth, typename F>
inline __attribute__((always_inline)) void for_each_vector(int64_t columns, const F& body) {
  int64_t column = 0;
  for (; column + kWidth <= columns; column += kWidth)
    body(column, int64_t{kWidth}, std::true_type());
  if (column < columns) body(column, columns - column, std::false_type());
}

template <typename T, typename Full>
inline __attribute__((always_inline)) Vec<T> load_vec(const T* from, int64_t count, Full) {
  if constexpr (Full::value)
    return load_vec(from);
  else
    return load_vec(from, count);
}

template <typename T, typename Full>
inline __attribute__((always_inline)) void store_vec(T* to, const Vec<T>& vector, int64_t count,
                                                     Full) {
  if constexpr (Full::value)
    store_vec(to, vector);
  else
    store_vec(to, vector, count);
}

// Chosen at run time, once a vector: half the code of a template, at no cost that was measured.
template <typename T, typename Full>
inline __attribute__((always_inline)) void store_or_stream(bool stream, T* to, const Vec<T>& vector,
                                                           int64_t count, Full) {
  if constexpr (!Full::value)
    store_vec(to, vector, count);
  else if (stream)
    stream_vec(to, vector);
  else
    store_vec(to, vector);
}

// The same, with the full vectors beginning where a full vector may be streamed to `to`: rows of
// odd length are rarely aligned.
template <int kWidth, typename T, typename F>
inline __attribute__((always_inline)) void for_each_aligned_vector(const T* to, int64_t columns,
                                                                   const F& body) {
  constexpr auto kBytes = static_cast<uintptr_t>(kWidth * sizeof(T));
  const auto past = reinterpret_cast<uintptr_t>(to) % kBytes;
  const int64_t head =
      std::min(columns, static_cast<int64_t>((kBytes - past) % kBytes / sizeof(T)));
  if (head > 0) body(int64_t{0}, head, std::false_type());
  for_each_vector<kWidth>(columns - head, [&](int64_t column, int64_t count, auto full) {
    body(head + column, count, full);
  });
}

// Adds `rows` rows of partial sums in order and stores them in the parameter's dtype.
template <typename P, typename A>
inline void sum_partials(const A* partials, int64_t rows, int64_t row_stride, int64_t columns,
                         P* out) {
  static_assert(std::is_same_v<A, Acc<P>>);
  for_each_vector<Vec<P>::size()>(columns, [&](int64_t column, int64_t count, auto full) {
    Vec<P> sum(A(0));
    for (int64_t row = 0; row < rows; ++row) {
      sum = sum + load_vec(partials + row * row_stride + column, count, full);
    }
    store_vec(out + column, sum, count, full);
  });
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
