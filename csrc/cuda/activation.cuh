// The variants of GELU and their derivatives on float and double: device functions, the formulae of
// csrc/cpu/elementwise/activation.h, with what is not finite as there.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../common/activation.h"

namespace fusedops::cuda {
namespace {

// fmin and fmax would drop a NaN.
template <typename A>
__device__ __forceinline__ A bounded(A x, A low, A high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
// To 2 ulp in float, by the special function unit.
__device__ __forceinline__ float quotient(float a, float b) {
  return __fdividef(a, b);
}
__device__ __forceinline__ double quotient(double a, double b) {
  return a / b;
}

// sigmoid(z) and sigmoid(z) * sigmoid(-z) from exp(-|z|): no overflow, no cancellation.
template <typename A>
struct Sigmoid {
  A value;
  A slope;
};

template <typename A>
__device__ __forceinline__ Sigmoid<A> sigmoid(A z) {
  const A t = exponential(z < A(0) ? z : -z);
  const A large = quotient(A(1), A(1) + t);
  const A small = t * large;
  return {z < A(0) ? small : large, small * large};
}

// The distribution function of the normal law and its density, |x| <= 14.5 in float.
template <typename A>
struct Normal {
  A cdf;
  A pdf;
};

__device__ __forceinline__ Normal<float> normal_law(float x) {
  const float y = fabsf(x);
  const float t = quotient(1.0f, 1.0f + 0.3f * y);
  float p = -0.020623552f;
  p = p * t + 0.11243606f;
  p = p * t - 0.22821465f;
  p = p * t + 0.19178593f;
  p = p * t - 0.079424635f;
  p = p * t + 0.09615744f;
  p = p * t + 0.07838944f;
  p = p * t + 0.11023547f;
  p = p * t + 0.11957181f;
  p = p * t + 0.11968669f;
  const float e = exponential(-0.5f * x * x);
  const float tail = e * (t * p);
  return {x < 0.0f ? tail : 1.0f - tail, e * 0.39894228f};
}

__device__ __forceinline__ Normal<double> normal_law(double x) {
  return {0.5 * erfc(-x * 0.70710678118654752440), 0.39894228040143267794 * exp(-0.5 * x * x)};
}

// The z of gelu(x) = x * sigmoid(z), and dz/dx.
template <Activation kActivation, typename A>
__device__ __forceinline__ A argument(A x) {
  if constexpr (kActivation == Activation::fast_gelu) {
    return A(1.702) * x;
  } else {
    // sqrt(8 / pi) * (x + 0.044715 x^3); x^2 is bounded so that it stays finite.
    const A square = bounded(x * x, A(0), A(1e8));
    return x * (A(1.5957691216057307) + A(1.5957691216057307 * 0.044715) * square);
  }
}

template <Activation kActivation, typename A>
__device__ __forceinline__ A argument_slope(A x) {
  if constexpr (kActivation == Activation::fast_gelu) {
    return A(1.702);
  } else {
    return A(1.5957691216057307) + A(3 * 1.5957691216057307 * 0.044715) * x * x;
  }
}

template <Activation kActivation, typename A>
__device__ __forceinline__ A gelu_value(A x) {
  if constexpr (kActivation == Activation::gelu) {
    return x * normal_law(bounded(x, A(-40), A(40))).cdf;
  } else {
    return x * sigmoid(argument<kActivation>(x)).value;
  }
}

template <Activation kActivation, typename A>
__device__ __forceinline__ A gelu_slope(A x) {
  if constexpr (kActivation == Activation::gelu) {
    const Normal<A> n = normal_law(bounded(x, A(-40), A(40)));
    return n.cdf + x * n.pdf;
  } else {
    // The tanh form's argument overflows before x does; 0 * x is NaN at infinities.
    const A y = bounded(x, A(-1e3), A(1e3));
    const Sigmoid<A> s = sigmoid(argument<kActivation>(y));
    return s.value + y * argument_slope<kActivation>(y) * s.slope + A(0) * x;
  }
}

// Calls f(std::integral_constant<Activation, A>()) for the variant met at run time.
template <typename F>
cudaError_t switch_gelu(Activation activation, const F& f) {
  switch (activation) {
    case Activation::gelu_tanh:
      return f(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::fast_gelu:
      return f(std::integral_constant<Activation, Activation::fast_gelu>());
    default:
      return f(std::integral_constant<Activation, Activation::gelu>());
  }
}

}  // namespace
}  // namespace fusedops::cuda
