// The C++ types of the CPU kernels' dtypes, and the switch from a run-time dtype to a template
// argument.
// No torch tensor type: kernels see raw pointers.
#pragma once

#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "types.h"

namespace fusedops {

// Half precision: bfloat16 and float16.
template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;

constexpr bool is_half(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f16;
}

// Calls f(T()) with the C++ type of `dtype`.
template <typename F>
inline void switch_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(float());
    case DType::bf16:
      return f(c10::BFloat16());
    case DType::f16:
      return f(c10::Half());
    case DType::f64:
      return f(double());
  }
}

// Calls f(T(), P()) for data of type T and parameters of type P: P is T, or float with half
// precision.
template <typename F>
inline void switch_dtypes(DType data, DType parameters, const F& f) {
  switch_dtype(data, [&](auto t) {
    if constexpr (kIsHalf<decltype(t)>) {
      if (parameters == DType::f32) return f(t, float());
    }
    f(t, t);
  });
}

// Calls f(I()) for a second input of data of type T: I is T, or half precision with float.
template <typename T, typename F>
inline void switch_beside(DType dtype, const F& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::bf16) return f(c10::BFloat16());
    if (dtype == DType::f16) return f(c10::Half());
  }
  f(T());
}

}  // namespace fusedops
