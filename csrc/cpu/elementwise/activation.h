// Activations and their derivatives on vectors of float32 and on double: device functions for the
// kernels, no loops over memory.
//
//   act_forward<A>(x)   y = A(x)
//   act_backward<A>(x)  A'(x) where A passes x on: with_slope multiplies the gradient by it
//
// Each takes one exponential and at most one or two divisions, so that an epilogue costs about 20
// to 40 instructions a vector (measured on one Zen 5 core, AVX-512: 0.2 ns an element for
// fast_gelu, 0.5 ns for gelu). float32 results of gelu are within 6 ulp (measured against float64
// on 2 million points; 1 on the mean), in the tails too, where x * 0.5 * (1 + erf) of eager torch
// has cancelled; the derivative, which has a zero, within 7 ulp of the larger of its terms. Without
// fused multiply-add (the default build) the far tails lose: 20 ulp at -5, 100 at -14. Exponents
// are clamped, so that nothing finite overflows. What is not finite is torch's: NaN passes through,
// the activations are inf at inf, and x times a factor that vanishes is NaN at an infinity. That
// costs nothing: the formulae do it by themselves.
//
// Include from *.isa.cpp only: everything lives in an anonymous namespace inside CPU_CAPABILITY.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../common/activation.h"
#include "../common/exp2_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kInvSqrt2 = 0.70710678118654752440;
constexpr double kInvSqrt2Pi = 0.39894228040143267794;
constexpr double kTanhCubic = 0.044715;
constexpr double kFastGeluScale = 1.702;

// exp(c * x). The product is never rounded (it enters through a fused multiply-add), so the result
// is right to about 1 ulp also where |c * x| is large. Saturates to 0 and infinity; NaN stays.
inline VecF exp_of_product(const VecF& x_in, const float c) {
  const float limit = 104.0f / std::fabs(c);
  const VecF x = at::vec::clamp(x_in, VecF(-limit), VecF(limit));
  const VecF n = (x * VecF(c * 1.44269504088896341f)).round();
  // Cody-Waite: the high part of ln 2 has 9 bits, so n * high is exact.
  VecF r = at::vec::fmadd(x, VecF(c), n * VecF(-0.693359375f));
  r = at::vec::fmadd(n, VecF(2.12194440e-4f), r);
  // Minimax on |r| <= ln(2)/2: relative error 3.2e-9.
  VecF p = at::vec::fmadd(VecF(0.0013950476f), r, VecF(0.008368882f));
  p = at::vec::fmadd(p, r, VecF(0.041666206f));
  p = at::vec::fmadd(p, r, VecF(0.16666518f));
  p = at::vec::fmadd(p, r, VecF(0.5f));
  p = at::vec::fmadd(p, r * r, r) + VecF(1.0f);
  return scale_by_power_of_two(p, n);
}

// sigmoid(z) and sigmoid'(z) = sigmoid(z) * sigmoid(-z) from t = exp(-|z|): no cancellation.
struct Sigmoid {
  VecF value;
  VecF slope;
};

inline Sigmoid sigmoid_from(const VecF& t, const VecF& z) {
  const VecF large = VecF(1.0f) / (VecF(1.0f) + t);
  const VecF small = t * large;
  return {VecF::blendv(large, small, z < VecF(0.0f)), small * large};
}

// 2^(y + low), for a small `low` that y cannot hold; for y + low in [-250, 250].
inline VecF exp2_of_sum(const VecF& y, const VecF& low) {
  const VecF whole = y.floor();
  const VecF r = (y - whole) + low;
  // Minimax on [0, 1]: relative error 7e-9.
  VecF p = at::vec::fmadd(VecF(2.1702245e-4f), r, VecF(1.2439693e-3f));
  p = at::vec::fmadd(p, r, VecF(9.67884e-3f));
  p = at::vec::fmadd(p, r, VecF(5.548334e-2f));
  p = at::vec::fmadd(p, r, VecF(0.24022983f));
  p = at::vec::fmadd(p, r, VecF(0.693147f));
  p = at::vec::fmadd(p, r, VecF(1.0f));
  return scale_by_power_of_two(p, whole);
}

// Phi(-a), the lower tail of the normal law, for a in [0, 14.5] (where it underflows), and
// exp(-a^2/2).
//
// Phi(-a) = exp(-a^2/2) * t * P(t), t = 1/(1 + 0.3 a), P of degree 9 (relative error 3.5e-9). The
// exponent is carried in two numbers, so that the tail is right.
struct NormalTail {
  VecF share;
  VecF exponential;
};

inline NormalTail normal_tail(const VecF& a) {
  constexpr double kScale = -0.5 * 1.44269504088896340736;
  const VecF high(static_cast<float>(kScale));
  const VecF rest(static_cast<float>(kScale - static_cast<float>(kScale)));
  const VecF square = a * a;
  const VecF y = square * high;
  VecF low = at::vec::fmsub(square, high, y);
  low = at::vec::fmadd(at::vec::fmsub(a, a, square), high, low);
  low = at::vec::fmadd(square, rest, low);
  const VecF e = exp2_of_sum(y, low);
  const VecF t = VecF(1.0f) / at::vec::fmadd(VecF(0.3f), a, VecF(1.0f));
  VecF p = at::vec::fmadd(VecF(-0.020623552f), t, VecF(0.11243606f));
  p = at::vec::fmadd(p, t, VecF(-0.22821465f));
  p = at::vec::fmadd(p, t, VecF(0.19178593f));
  p = at::vec::fmadd(p, t, VecF(-0.079424635f));
  p = at::vec::fmadd(p, t, VecF(0.09615744f));
  p = at::vec::fmadd(p, t, VecF(0.07838944f));
  p = at::vec::fmadd(p, t, VecF(0.11023547f));
  p = at::vec::fmadd(p, t, VecF(0.11957181f));
  p = at::vec::fmadd(p, t, VecF(0.11968669f));
  return {e * (t * p), e};
}

// 2u = sqrt(8/pi) * (x + 0.044715 x^3): gelu_tanh(x) = x * sigmoid(2u), since
// (1 + tanh u)/2 = sigmoid(2u). x^2 is bounded so that the slope below stays finite.
constexpr float kTanhLinear = static_cast<float>(2 * kSqrt2OverPi);
constexpr float kTanhCube = static_cast<float>(2 * kSqrt2OverPi * kTanhCubic);

inline VecF bounded_square(const VecF& x) {
  return at::vec::clamp_max(x * x, VecF(1e8f));
}

template <Activation A>
inline VecF act_forward(const VecF& x) {
  const VecF one(1.0f);
  if constexpr (A == Activation::identity) {
    return x;
  } else if constexpr (A == Activation::relu) {
    return at::vec::maximum(x, VecF(0.0f));
  } else if constexpr (A == Activation::relu2) {
    const VecF positive = at::vec::maximum(x, VecF(0.0f));
    return positive * positive;
  } else if constexpr (A == Activation::silu) {
    return x / (one + exp_of_product(x, -1.0f));
  } else if constexpr (A == Activation::fast_gelu) {
    return x / (one + exp_of_product(x, static_cast<float>(-kFastGeluScale)));
  } else if constexpr (A == Activation::gelu_tanh) {
    const VecF z = x * at::vec::fmadd(VecF(kTanhCube), bounded_square(x), VecF(kTanhLinear));
    return x / (one + exp_of_product(z, -1.0f));
  } else {
    static_assert(A == Activation::gelu);
    // x * Phi(x) = max(x, 0) - |x| * Phi(-|x|), whose last factor is 0 from 14.5 on: there the one
    // before is bounded for inf's sake, and not for that of -inf, which is NaN.
    const VecF bounded = at::vec::clamp_max(x, VecF(14.5f)).abs();
    const VecF a = at::vec::clamp_max(bounded, VecF(14.5f));
    return at::vec::fnmadd(bounded, normal_tail(a).share, at::vec::clamp_min(x, VecF(0.0f)));
  }
}

template <Activation A>
inline VecF act_backward(const VecF& x) {
  const VecF zero(0.0f);
  if constexpr (A == Activation::identity) {
    return VecF(1.0f);
  } else if constexpr (A == Activation::relu) {
    return VecF(1.0f);
  } else if constexpr (A == Activation::relu2) {
    return x + x;
  } else if constexpr (A == Activation::silu) {
    const Sigmoid s = sigmoid_from(exp_of_product(x.abs(), -1.0f), x);
    return at::vec::fmadd(x, s.slope, s.value);
  } else if constexpr (A == Activation::fast_gelu) {
    constexpr float scale = static_cast<float>(kFastGeluScale);
    const Sigmoid s = sigmoid_from(exp_of_product(x.abs(), -scale), x);
    return at::vec::fmadd(x, s.slope * VecF(scale), s.value);
  } else if constexpr (A == Activation::gelu_tanh) {
    const VecF square = bounded_square(x);
    const VecF z = x * at::vec::fmadd(VecF(kTanhCube), square, VecF(kTanhLinear));
    const VecF dz = at::vec::fmadd(VecF(3 * kTanhCube), square, VecF(kTanhLinear));
    const Sigmoid s = sigmoid_from(exp_of_product(z.abs(), -1.0f), z);
    return at::vec::fmadd(x, s.slope * dz, s.value);
  } else {
    static_assert(A == Activation::gelu);
    // At -|x|; the derivative at |x| is one minus it. The exponential is 0 from 14.5 on.
    const NormalTail tail = normal_tail(at::vec::clamp_max(x.abs(), VecF(14.5f)));
    const VecF scaled = x.abs() * VecF(static_cast<float>(kInvSqrt2Pi));
    const VecF slope = at::vec::fnmadd(scaled, tail.exponential, tail.share);
    return VecF::blendv(VecF(1.0f) - slope, slope, x < zero);
  }
}

template <Activation A>
inline double act_forward(const double x) {
  if constexpr (A == Activation::identity) {
    return x;
  } else if constexpr (A == Activation::relu) {
    return x < 0 ? 0.0 : x;
  } else if constexpr (A == Activation::relu2) {
    return x < 0 ? 0.0 : x * x;
  } else if constexpr (A == Activation::silu) {
    return x / (1 + std::exp(-x));
  } else if constexpr (A == Activation::fast_gelu) {
    return x / (1 + std::exp(-kFastGeluScale * x));
  } else if constexpr (A == Activation::gelu_tanh) {
    return x / (1 + std::exp(-2 * kSqrt2OverPi * (x + kTanhCubic * x * x * x)));
  } else {
    static_assert(A == Activation::gelu);
    return 0.5 * x * std::erfc(-x * kInvSqrt2);
  }
}

template <Activation A>
inline double act_backward(const double x) {
  // sigmoid(z) + x * z'(x) * sigmoid(z) * sigmoid(-z); the slope of z overflows before x does.
  const auto gated = [x](const double z, const double slope) {
    const double t = std::exp(-std::fabs(z));
    const double large = 1 / (1 + t);
    const double product = t == 0 ? x * t : x * slope * t * large * large;
    return (z < 0 ? t * large : large) + product;
  };
  if constexpr (A == Activation::identity) {
    return 1.0;
  } else if constexpr (A == Activation::relu) {
    return 1.0;
  } else if constexpr (A == Activation::relu2) {
    return 2 * x;
  } else if constexpr (A == Activation::silu) {
    return gated(x, 1.0);
  } else if constexpr (A == Activation::fast_gelu) {
    return gated(kFastGeluScale * x, kFastGeluScale);
  } else if constexpr (A == Activation::gelu_tanh) {
    const double z = 2 * kSqrt2OverPi * (x + kTanhCubic * x * x * x);
    return gated(z, 2 * kSqrt2OverPi * (1 + 3 * kTanhCubic * x * x));
  } else {
    static_assert(A == Activation::gelu);
    const double density = kInvSqrt2Pi * std::exp(-0.5 * x * x);
    return 0.5 * std::erfc(-x * kInvSqrt2) + x * density;
  }
}

template <Activation A>
inline VecD act_forward(const VecD& x) {
  double values[VecD::size()];
  x.store(values);
  for (double& value : values) value = act_forward<A>(value);
  return VecD::loadu(values);
}

template <Activation A>
inline VecD act_backward(const VecD& x) {
  double values[VecD::size()];
  x.store(values);
  for (double& value : values) value = act_backward<A>(value);
  return VecD::loadu(values);
}

// grad * slope, which has the factor act_backward<A>(x). As torch's threshold_backward: nothing
// passes what relu stopped, NaN neither, and all passes where x is NaN.
template <Activation A, typename V>
inline V with_slope(const V& grad, const V& slope, const V& x) {
  constexpr bool kStops = A == Activation::relu || A == Activation::relu2;
  return kStops ? V::blendv(grad * slope, V(0), x <= V(0)) : grad * slope;
}

// Calls body(std::integral_constant<Activation, A>{}) for the activation met at run time.
template <typename Body>
inline void with_activation(const Activation activation, const Body& body) {
  switch (activation) {
#define FUSEDOPS_ACTIVATION_CASE(name) \
  case Activation::name:               \
    return body(std::integral_constant<Activation, Activation::name>{});
    FUSEDOPS_ACTIVATION_CASE(identity)
    FUSEDOPS_ACTIVATION_CASE(relu)
    FUSEDOPS_ACTIVATION_CASE(relu2)
    FUSEDOPS_ACTIVATION_CASE(silu)
    FUSEDOPS_ACTIVATION_CASE(gelu)
    FUSEDOPS_ACTIVATION_CASE(gelu_tanh)
    FUSEDOPS_ACTIVATION_CASE(fast_gelu)
#undef FUSEDOPS_ACTIVATION_CASE
  }
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
