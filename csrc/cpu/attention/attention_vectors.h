// Vectors of attention's kernels and their functions: loads, exponentials, logarithms, masks.
//
// Include from *.isa.cpp only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../common/vec.h"
#include "../elementwise/activation.h"
#include "attention.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
using V = typename Lanes<A>::type;

constexpr double kLog2Of = 1.44269504088896340736;  // of e
constexpr double kLn2 = 0.69314718055994530942;

template <typename A>
inline V<A> all(A value) {
  return value - V<A>{};
}

template <typename A>
inline V<A> load(const A* from) {
  return *reinterpret_cast<const V<A>*>(from);
}

template <typename A>
inline void store(A* to, const V<A>& v) {
  *reinterpret_cast<V<A>*>(to) = v;
}

template <typename Vector>
inline Vector larger(const Vector& a, const Vector& b) {
  return a > b ? a : b;
}

// The rounded value: the compiler would make one multiply-add of a product and the sum
// after it, and a maximum of rounded products is no bound of exact ones. At scores of 1e10 they
// differ by hundreds.
template <typename Vector>
inline Vector as_rounded(Vector value) {
#if defined(CPU_CAPABILITY_AVX512)
  asm("" : "+v"(value));
#elif defined(__x86_64__)
  asm("" : "+x"(value));
#endif
  return value;
}

// 0, 1, 2, ...
template <typename A>
inline V<A> iota() {
  V<A> v;
  for (int i = 0; i < kLanes<A>; ++i) v[i] = static_cast<A>(i);
  return v;
}

// 2^x for x up to the exponent's range; 0 at minus infinity, NaN stays. kShort: good to 2.6e-6,
// for outputs that are rounded to half precision; else to 2e-7.
template <bool kShort>
inline V<float> exp2_of(const V<float>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto y = (__m512)x;
  if constexpr (kShort) {
    const __m512 r = _mm512_reduce_ps(y, 0x9);  // y - floor(y), 0 at infinities
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.013534168f), r, _mm512_set1_ps(0.052011464f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24144275f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69300383f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0000026f));
    return (V<float>)_mm512_scalef_ps(p, y);  // takes floor(y)
  } else {
    const __m512 n = _mm512_roundscale_ps(y, 0x8);
    const __m512 r = _mm512_reduce_ps(y, 0x8);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.32765e-3f), r, _mm512_set1_ps(9.67554e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550713e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402212f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314697f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return (V<float>)_mm512_scalef_ps(p, n);
  }
#elif defined(CPU_CAPABILITY_AVX2)
  const VecF y = exp_of_product(VecF((__m256)x), static_cast<float>(kLn2));
  // exp_of_product stops at exp(-104), which is 0 after its scaling.
  return (V<float>)static_cast<__m256>(y);
#else
  V<float> y;
  for (int i = 0; i < kLanes<float>; ++i) y[i] = std::exp2(x[i]);
  return y;
#endif
}

template <bool>
inline V<double> exp2_of(const V<double>& x) {
  V<double> y;
  for (int i = 0; i < kLanes<double>; ++i) y[i] = std::exp2(x[i]);
  return y;
}

template <typename A>
inline V<A> tanh_of(const V<A>& x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  at::vec::Vectorized<A> wide;
  static_assert(sizeof(wide) == sizeof(x));
  std::memcpy(static_cast<void*>(&wide), &x, sizeof(x));
  wide = wide.tanh();
  V<A> y;
  std::memcpy(&y, static_cast<const void*>(&wide), sizeof(y));
  return y;
#else
  V<A> y;
  for (int i = 0; i < kLanes<A>; ++i) y[i] = std::tanh(x[i]);
  return y;
#endif
}

// An additive mask in units of log2. Only minus infinity forbids: a finite number stays finite,
// so that a row of the least one is a row of equal scores, as torch has it.
template <typename A>
inline V<A> mask_in_bits(const V<A>& mask) {
  const V<A> bits = mask * static_cast<A>(kLog2Of);
  const V<A> least = all(std::numeric_limits<A>::lowest());
  return (mask >= least) & (bits < least) ? least : bits;
}

template <typename A>
inline V<A> log2_of(const V<A>& x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  at::vec::Vectorized<A> wide;
  static_assert(sizeof(wide) == sizeof(x));
  std::memcpy(static_cast<void*>(&wide), &x, sizeof(x));
  wide = wide.log2();
  V<A> y;
  std::memcpy(&y, static_cast<const void*>(&wide), sizeof(y));
  return y;
#else
  V<A> y;
  for (int i = 0; i < kLanes<A>; ++i) y[i] = std::log2(x[i]);
  return y;
#endif
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
