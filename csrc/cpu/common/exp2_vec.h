// 2^y on vectors: what softmax-like kernels take instead of exp, the factor 1 / ln 2 being folded
// into a multiplication that is there anyway; and exp for those that have none.
//
// Include from *.isa.cpp only.
#pragma once

#include "../elementwise/activation.h"
#include "vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr double kLog2E = 1.44269504088896340736;

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

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
