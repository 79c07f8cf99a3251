// What the epilogues of the matrix products share: the activation of a sum and its derivative, rows
// of results, and the switch over dtype and activation.
//
// Include from *.isa.cpp only.
#pragma once

#include <cstdint>

#include "../common/vec.h"
#include "../elementwise/activation.h"
#include "../elementwise/gelu_vec.h"

namespace fusedops::CPU_CAPABILITY {
namespace {

constexpr bool is_gelu(Activation activation) {
  return activation == Activation::gelu || activation == Activation::gelu_tanh ||
         activation == Activation::fast_gelu;
}

// Whether the activation of T has a form that is as short as half precision needs.
template <typename T, Activation A>
constexpr bool kHasShortForm =
#if defined(CPU_CAPABILITY_AVX512)
    kIsHalf<T> && A == Activation::silu;
#else
    false;
#endif

// The activation of z, a sum of products of T, and its derivative (for with_slope).
template <typename T, Activation A>
inline Vec<T> activated(const Vec<T>& z) {
  if constexpr (is_gelu(A) || kHasShortForm<T, A>) {
    return gelu_value<T, A>(z);
  } else {
    return act_forward<A>(z);
  }
}

template <typename T, Activation A>
inline Vec<T> slope(const Vec<T>& z) {
  if constexpr (is_gelu(A) || kHasShortForm<T, A>) {
    return gelu_slope<T, A>(z);
  } else {
    return act_backward<A>(z);
  }
}

// Rows of a row-major matrix [rows, columns]; null stays null.
template <typename T>
inline T* at(void* data, int64_t row, int64_t columns, int64_t column) {
  return data == nullptr ? nullptr : static_cast<T*>(data) + row * columns + column;
}

template <typename T>
inline const T* at(const void* data, int64_t row, int64_t columns, int64_t column) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + row * columns + column;
}

// Calls body(T(), activation tag).
template <typename Body>
inline void with_types(DType dtype, Activation activation, const Body& body) {
  switch_dtype(dtype,
               [&](auto t) { with_activation(activation, [&](auto tag) { body(t, tag); }); });
}

}  // namespace
}  // namespace fusedops::CPU_CAPABILITY
