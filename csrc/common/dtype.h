// The dtypes of the CPU kernels and the switch from a run-time dtype to a template argument.
// No torch tensor type: kernels see raw pointers.
#pragma once

#include <c10/util/BFloat16.h>

namespace fusedops {

enum class DType { f32, bf16, f64 };

// Calls f(T()) with the C++ type of `dtype`.
template <typename F>
inline void switch_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(float());
    case DType::bf16:
      return f(c10::BFloat16());
    case DType::f64:
      return f(double());
  }
}

// Calls f(T(), P()) for data of type T and parameters of type P: P is T, or float beside bfloat16.
template <typename F>
inline void switch_dtypes(DType data, DType parameters, const F& f) {
  if (data == DType::bf16 && parameters == DType::f32) return f(c10::BFloat16(), float());
  switch_dtype(data, [&](auto t) { f(t, t); });
}

}  // namespace fusedops
