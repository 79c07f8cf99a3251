// The logits of a row as vectors: soft-capping, and the gradient of the loss. For cross_entropy and
// the epilogue of linear_cross_entropy.
//
// Include from *.isa.cpp only.
#pragma once

#include <cmath>

#include "../common/exp2_vec.h"
#include "../common/vec.h"
#include "cross_entropy.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

template <typename A>
inline A first_lane(const at::vec::Vectorized<A>& vector) {
  A values[at::vec::Vectorized<A>::size()];
  vector.store(values);
  return values[0];
}

// tanh(u) and its derivative.
template <typename V>
struct Tanh {
  V value;
  V slope;
};

// From t = exp(-2|u|): (1 - t) / (1 + t), the derivative 4 t / (1 + t)^2 without cancellation; near
// zero, where 1 - t cancels, u * P(u^2), to 1.4e-8.
inline Tanh<VecF> tanh_of(const VecF& u) {
  const VecF one(1.0f), a = u.abs();
  const VecF t = exp2_full(a * VecF(static_cast<float>(-2 * kLog2E)));
  const VecF r = one / (one + t);
  const VecF sign = u & VecF(-0.0f);
  const VecF large = ((one - t) * r) | sign;
  const VecF square = u * u;
  VecF p = at::vec::fmadd(VecF(0.0171350066f), square, VecF(-0.0529860753f));
  p = at::vec::fmadd(p, square, VecF(0.133247793f));
  p = at::vec::fmadd(p, square, VecF(-0.333330694f));
  p = at::vec::fmadd(p, square, VecF(0.999999987f));
  return {VecF::blendv(large, u * p, a < VecF(0.5f)), VecF(4.0f) * t * r * r};
}

inline Tanh<VecD> tanh_of(const VecD& u) {
  const VecD value = u.tanh();
  return {value, VecD(1.0) - value * value};
}

// y = softcap * tanh(x / softcap), or x.
template <typename A, bool kCapped>
inline at::vec::Vectorized<A> capped(const at::vec::Vectorized<A>& x, A softcap) {
  using V = at::vec::Vectorized<A>;
  if constexpr (kCapped) {
    return tanh_of(x * V(A(1) / softcap)).value * V(softcap);
  } else {
    return x;
  }
}

// What exp makes 0, and a factor of that 0 may be: of a class of logit -inf nothing is left.
constexpr double kVanished = -1000;

// Calls body(capped, tokens), both std::bool_constant, as the options say.
template <typename Body>
inline void with_form(const LossOptions& o, const Body& body) {
  const auto with = [&](auto capped) {
    o.tokens ? body(capped, std::true_type()) : body(capped, std::false_type());
  };
  o.softcap > 0 ? with(std::true_type()) : with(std::false_type());
}

// The gradient of a row's logits; T is the dtype of the result.
template <typename T, bool kCapped, bool kTokens>
class GradientOfRow {
  using A = Acc<T>;
  using V = Vec<T>;

 public:
  GradientOfRow(const RowGradient& row, const LossOptions& options)
      : largest_(static_cast<A>(row.largest)),
        scale_(static_cast<A>(row.scale)),
        shift_(static_cast<A>(row.shift)),
        tilt_(static_cast<A>(row.tilt)),
        label_(static_cast<A>(row.label)),
        softcap_(static_cast<A>(options.softcap)),
        inverse_temperature_(static_cast<A>(options.inverse_temperature)) {}

  // At logits x; `label` is added to the gradient of y.
  V at(const V& x) const { return gradient<T>(x, shift_); }
  // There softmax - 1 may cancel: the exponential is a good one also for half precision.
  A at_target(A x) const { return first_lane(gradient<A>(V(x), V(label_) + shift_)); }

 private:
  template <typename Exp>
  V gradient(const V& x, const V& shift) const {
    V y = x, slope = x;
    if constexpr (kCapped) {
      const auto bounded = tanh_of(x * V(A(1) / softcap_));
      y = bounded.value * V(softcap_);
      slope = bounded.slope;
    }
    if constexpr (kTokens) y = y * V(inverse_temperature_);
    const V shifted = y - largest_;
    const V p = exp2_of<Exp>(shifted * V(static_cast<A>(kLog2E)));
    V scale = scale_;
    if constexpr (kTokens) {
      scale = at::vec::fmadd(at::vec::clamp_min(shifted, V(A(kVanished))), tilt_, scale_);
    }
    const V grad = at::vec::fmadd(p, scale, shift);
    return kCapped ? grad * slope : grad;
  }

  V largest_, scale_, shift_, tilt_;
  A label_, softcap_, inverse_temperature_;
};

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
