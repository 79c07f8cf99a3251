// Device functions of the row kernels: packs of 16 bytes, conversions, sums over a row's threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusedops::cuda {

inline constexpr int kWarp = 32;

// Statistics and sums are float, double for double.
template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using Acc = typename Accumulator<T>::type;

template <typename A, typename T>
__device__ __forceinline__ A widen(T value) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<A>(static_cast<float>(value));
  } else {
    return static_cast<A>(value);
  }
}

template <typename T, typename A>
__device__ __forceinline__ T narrow(A value) {
  if constexpr (sizeof(T) == 2) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

__device__ __forceinline__ float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ __forceinline__ double multiply(double a, double b) {
  return __dmul_rn(a, b);
}
// Rounding may leave a variance just below zero; NaN stays NaN, which max(x, 0) would lose.
template <typename A>
__device__ __forceinline__ A not_negative(A x) {
  return x < A(0) ? A(0) : x;
}
__device__ __forceinline__ float inverse_root(float x) {
  return 1.0f / sqrtf(x);
}
__device__ __forceinline__ double inverse_root(double x) {
  return 1.0 / sqrt(x);
}

// N elements that are loaded and stored by one instruction, or by one per 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load_pack(const T* pointer) {
  return *reinterpret_cast<const Pack<T, N>*>(pointer);
}

template <typename T, int N, typename A>
__device__ __forceinline__ void load(const T* pointer, A (&values)[N]) {
  const auto pack = load_pack<T, N>(pointer);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = widen<A>(pack.at[i]);
}

template <typename T, int N, typename A>
__device__ __forceinline__ void store(T* pointer, const A (&values)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = narrow<T>(values[i]);
  *reinterpret_cast<Pack<T, N>*>(pointer) = pack;
}

// Parameters may be absent: `absent` then stands for each.
template <int N, typename P, typename A>
__device__ __forceinline__ void load_or(const P* pointer, int64_t column, A absent,
                                        A (&values)[N]) {
  if (pointer != nullptr) {
    load<P, N>(pointer + column, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = absent;
  }
}

// The shared memory that the launch asks for.
template <typename A>
__device__ __forceinline__ A* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_memory[];
  return reinterpret_cast<A*>(dynamic_memory);
}

// Adds K numbers over the threads of a row, in an order that is always the same; every thread gets
// the sums. A row's threads are threadIdx.x, whole warps; all threads of the block must call.
// Two calls in a row must use different `turn`s (0, 1): that saves a barrier.
template <int K, typename A>
__device__ __forceinline__ void sum_over_row(A (&values)[K], int turn) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) {
      values[k] += __shfl_xor_sync(0xffffffffu, values[k], lane);
    }
  }
  if (blockDim.x == kWarp) return;
  __shared__ A scratch[2][kWarp][K];  // at most 32 warps
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = static_cast<int>(threadIdx.y) * warps;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      scratch[turn][first + static_cast<int>(threadIdx.x) / kWarp][k] = values[k];
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    values[k] = lane < warps ? scratch[turn][first + lane][k] : A(0);
#pragma unroll
    for (int other = kWarp / 2; other > 0; other /= 2) {
      values[k] += __shfl_xor_sync(0xffffffffu, values[k], other);
    }
  }
}

}  // namespace fusedops::cuda
