// The variants of GELU and their derivatives on vectors, for gelu and bias_gelu.
//
// Beyond activation.h: for half precision on AVX-512 forms good to 2e-5 in half of the
// instructions, so that two cores keep up with memory. That is a hundredth of the rounding to
// bfloat16 that follows, and a twentieth of that to float16: of all float16 numbers the value is
// within 0.516 units of the last place, and one in two hundred is not the nearest. On one Zen 5
// core with data in L1, ns an element forward and backward: erf 0.17 and 0.19, tanh 0.11 and 0.15,
// fast 0.08 and 0.12; the float32 forms take 0.36 and 0.39, 0.21 and 0.34, 0.16 and 0.26. NaN and
// infinities give what they give there.
//
// Include from *.isa.cpp only.
#pragma once

#include <limits>

#include "../common/exp2_vec.h"
#include "../common/vec.h"
#include "activation.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
// -z / ln 2 for the z of gelu(x) = x * sigmoid(z), and z' = dz/dx. SiLU is the GELU with z = x.
template <Activation kActivation>
inline VecF minus_z_in_bits(const VecF& x) {
  if constexpr (kActivation == Activation::silu) {
    return x * VecF(static_cast<float>(-kLog2E));
  } else if constexpr (kActivation == Activation::fast_gelu) {
    return x * VecF(static_cast<float>(-kFastGeluScale * kLog2E));
  } else {
    constexpr double scale = -2 * kSqrt2OverPi * kLog2E;
    return x * at::vec::fmadd(VecF(static_cast<float>(scale * kTanhCubic)), x * x,
                              VecF(static_cast<float>(scale)));
  }
}

template <Activation kActivation>
inline VecF z_slope(const VecF& x) {
  if constexpr (kActivation == Activation::silu) {
    return VecF(1.0f);
  } else if constexpr (kActivation == Activation::fast_gelu) {
    return VecF(static_cast<float>(kFastGeluScale));
  } else {
    return at::vec::fmadd(VecF(3 * kTanhCube), x * x, VecF(kTanhLinear));
  }
}

// For a = |x|: exp(-a^2/2), and Phi(-a) = exp(-a^2/2) * t * P(t) with t = 1/(1 + 0.3 a), to 1.1e-5.
struct Tail {
  VecF exponential;
  VecF share;
};

inline Tail normal_tail_short(const VecF& a) {
  const VecF e = exp2_short(a * (a * VecF(static_cast<float>(-0.5 * kLog2E))));
  const VecF t = VecF(1.0f) / at::vec::fmadd(VecF(0.3f), a, VecF(1.0f));
  VecF p = at::vec::fmadd(VecF(-0.077097155f), t, VecF(0.21603625f));
  p = at::vec::fmadd(p, t, VecF(-0.016947143f));
  p = at::vec::fmadd(p, t, VecF(0.14419588f));
  p = at::vec::fmadd(p, t, VecF(0.11374205f));
  p = at::vec::fmadd(p, t, VecF(0.12007422f));
  return {e, e * (t * p)};
}

template <Activation kActivation>
inline VecF gelu_value_short(const VecF& x) {
  const VecF zero(0.0f);
  if constexpr (kActivation == Activation::gelu) {
    // x * Phi(x) = max(x, 0) - |x| * Phi(-|x|), with -inf * 0 = NaN and no inf * 0. (vminps returns
    // its second operand where there is a NaN.)
    const VecF a = VecF(_mm512_min_ps(VecF(std::numeric_limits<float>::max()), x)).abs();
    return at::vec::fnmadd(a, normal_tail_short(a).share, VecF(_mm512_max_ps(zero, x)));
  } else {
    return x / (VecF(1.0f) + exp2_short(minus_z_in_bits<kActivation>(x)));
  }
}

template <Activation kActivation>
inline VecF gelu_slope_short(const VecF& x_in) {
  const VecF one(1.0f);
  if constexpr (kActivation == Activation::gelu) {
    // At -|x|; the derivative at |x| is one minus it.
    const VecF a = x_in.abs();
    const Tail tail = normal_tail_short(a);
    const VecF scaled = a * VecF(static_cast<float>(kInvSqrt2Pi));
    const VecF slope = at::vec::fnmadd(scaled, tail.exponential, tail.share);
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x_in));
    return _mm512_mask_sub_ps(slope, _knot_mask16(negative), one, slope);
  } else {
    // x * z_slope may overflow before x does: it is taken of a bounded x, which is given back its
    // NaN at infinities at the end.
    constexpr bool kBounded = kActivation != Activation::silu;
    const VecF x = kBounded ? at::vec::clamp(x_in, VecF(-1e3f), VecF(1e3f)) : x_in;
    const VecF s = one / (one + exp2_short(minus_z_in_bits<kActivation>(x)));
    const VecF s_slope = at::vec::fnmadd(s, s, s);
    const VecF slope = at::vec::fmadd(x * z_slope<kActivation>(x), s_slope, s);
    return kBounded ? at::vec::fmadd(x_in, VecF(0.0f), slope) : slope;
  }
}
#endif

// GELU of the sum x, which was computed from data of type T.
template <typename T, Activation kActivation>
inline Vec<T> gelu_value(const Vec<T>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kIsHalf<T>) return gelu_value_short<kActivation>(x);
#endif
  return act_forward<kActivation>(x);
}

// Its derivative.
template <typename T, Activation kActivation>
inline Vec<T> gelu_slope(const Vec<T>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kIsHalf<T>) return gelu_slope_short<kActivation>(x);
#endif
  return act_backward<kActivation>(x);
}

// Calls body(std::integral_constant<Activation, A>{}) for the GELU variant met at run time.
template <typename Body>
inline void with_gelu(const Activation activation, const Body& body) {
  switch (activation) {
    case Activation::gelu_tanh:
      return body(std::integral_constant<Activation, Activation::gelu_tanh>{});
    case Activation::fast_gelu:
      return body(std::integral_constant<Activation, Activation::fast_gelu>{});
    default:
      return body(std::integral_constant<Activation, Activation::gelu>{});
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
