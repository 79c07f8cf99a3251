// The variants of GELU on vectors of any argument, infinities included, for gelu and bias_gelu.
//
// activation.h multiplies x by a factor that vanishes at -infinity: IEEE arithmetic then says NaN
// (as eager torch does). Here the limits are returned: gelu(-inf) = 0, gelu'(inf) = 1,
// gelu'(-inf) = 0. NaN stays NaN. Costs one instruction forward and two backward.
//
// Include from *.isa.cpp only.
#pragma once

#include <limits>

#include "activation.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <Activation kActivation, typename A>
inline at::vec::Vectorized<A> gelu_value(const at::vec::Vectorized<A>& x) {
  using V = at::vec::Vectorized<A>;
  return act_forward<kActivation>(at::vec::clamp_min(x, V(std::numeric_limits<A>::lowest())));
}

// All derivatives are 0 or 1 to double precision where |x| > 1e3.
template <Activation kActivation, typename A>
inline at::vec::Vectorized<A> gelu_slope(const at::vec::Vectorized<A>& x) {
  using V = at::vec::Vectorized<A>;
  return act_backward<kActivation>(at::vec::clamp(x, V(A(-1e3)), V(A(1e3))));
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
