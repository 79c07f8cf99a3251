// 2^y on vectors: what softmax-like kernels take instead of exp, the factor 1 / ln 2 being folded
// into a multiplication that is there anyway; and exp for those that have none.
//
// Include from *.isa.cpp only.
#pragma once

#include <cmath>

#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

using VecF = at::vec::Vectorized<float>;
using VecD = at::vec::Vectorized<double>;

constexpr double kLog2E = 1.44269504088896340736;

// p * 2^n for integral n in [-151, 151], with gradual underflow and overflow to infinity.
inline VecF scale_by_power_of_two(const VecF& p, const VecF& n) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(p, n);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i k = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(k, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const auto power = [&](__m256i e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, bias), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(k, half)));
#else
  float values[VecF::size()];
  float exponents[VecF::size()];
  p.store(values);
  n.store(exponents);
  for (int i = 0; i < VecF::size(); ++i) {
    // NaN has no exponent: let the mantissa carry it.
    const int e = exponents[i] == exponents[i] ? static_cast<int>(exponents[i]) : 0;
    values[i] = std::ldexp(values[i], e);
  }
  return VecF::loadu(values);
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
// 2^y to 2.6e-6, for any y: 0 and infinity where it underflows and overflows.
inline VecF exp2_short(const VecF& y) {
  const VecF r = _mm512_reduce_ps(y, 0x9);  // y - floor(y); scalef below takes floor(y)
  VecF p = at::vec::fmadd(VecF(0.013534168f), r, VecF(0.052011464f));
  p = at::vec::fmadd(p, r, VecF(0.24144275f));
  p = at::vec::fmadd(p, r, VecF(0.69300383f));
  p = at::vec::fmadd(p, r, VecF(1.0000026f));
  return _mm512_scalef_ps(p, y);
}
#endif

// 2^y to 7.5e-8 and the rounding of y; 0 and infinity where it underflows and overflows.
inline VecF exp2_full(const VecF& y) {
#if defined(CPU_CAPABILITY_AVX512)
  const VecF r = _mm512_reduce_ps(y, 0x9);
#else
  const VecF bounded = at::vec::clamp(y, VecF(-151.0f), VecF(151.0f));
  const VecF whole = bounded.floor();
  const VecF r = bounded - whole;
#endif
  VecF p = at::vec::fmadd(VecF(0.00187757668f), r, VecF(0.00898934009f));
  p = at::vec::fmadd(p, r, VecF(0.0558263181f));
  p = at::vec::fmadd(p, r, VecF(0.240153617f));
  p = at::vec::fmadd(p, r, VecF(0.693153073f));
  p = at::vec::fmadd(p, r, VecF(0.999999925f));
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(p, y);
#else
  return scale_by_power_of_two(p, whole);
#endif
}

// 2^y as good as results of type T can show.
template <typename T>
inline Vec<T> exp2_of(const Vec<T>& y) {
  if constexpr (std::is_same_v<T, double>) {
    return y.exp2();
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (kIsHalf<T>) return exp2_short(y);
#endif
    return exp2_full(y);
  }
}

// exp(x) as good as results of type T can show, for x <= 0; 0 for -inf, NaN stays NaN.
template <typename T>
inline Vec<T> exp_of(const Vec<T>& x) {
  if constexpr (std::is_same_v<T, double>) {
    return x.exp();
  } else {
    return exp2_of<T>(x * Vec<T>(static_cast<float>(kLog2E)));
  }
}

// exp(x) for products of many factors: to one unit in the last place, 1 at 0 and without a bias,
// which ``exp_of`` has (7.5e-8: the state of 4096 tokens was off by 1.5e-4). 0 and infinity where
// it underflows and overflows; NaN stays NaN.
inline VecF exp_unbiased(const VecF& x) {
  const VecF bounded = at::vec::clamp(x, VecF(-105.0f), VecF(105.0f));
  const VecF n = (bounded * VecF(static_cast<float>(kLog2E))).round();
  // n * ln 2 in two parts, of which the first has few bits: its products are exact.
  VecF r = at::vec::fmadd(n, VecF(-0.693359375f), bounded);
  r = at::vec::fmadd(n, VecF(2.12194440e-4f), r);
  VecF p = at::vec::fmadd(VecF(0.00138145405f), r, VecF(0.00836874545f));
  p = at::vec::fmadd(p, r, VecF(0.041668389f));
  p = at::vec::fmadd(p, r, VecF(0.166665211f));
  p = at::vec::fmadd(p, r, VecF(0.49999994f));
  p = at::vec::fmadd(p, r * r, r) + VecF(1.0f);
  return scale_by_power_of_two(p, n);
}

inline VecD exp_unbiased(const VecD& x) {
  return x.exp();
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
