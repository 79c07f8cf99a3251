// What launchers share: the switch from run-time dtypes to types, the alignment of packs, and the
// kernel that adds partial sums of parameter gradients.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../common/types.h"
#include "device.cuh"

namespace fusedops::cuda {
namespace {

template <typename T>
constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

inline bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;  // null counts
}

// Launches a kernel by a call that returns the error, in place of nvcc's <<<>>>.
template <typename... Parameters, typename... Arguments>
cudaError_t enqueue(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                    cudaStream_t stream, const Arguments&... arguments) {
  const cudaLaunchConfig_t config{grid, block, shared, stream, nullptr, 0};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Calls f(T()) for data of type T.
template <typename F>
cudaError_t switch_type(DType data, const F& f) {
  switch (data) {
    case DType::f32:
      return f(float());
    case DType::f16:
      return f(__half());
    case DType::bf16:
      return f(__nv_bfloat16());
    case DType::f64:
      return f(double());
  }
  return cudaErrorInvalidValue;
}

// Calls f(T(), P()) for data of type T and parameters of type P: P is T, or float with a half.
template <typename F>
cudaError_t switch_types(DType data, DType parameters, const F& f) {
  return switch_type(data, [&](auto t) {
    if constexpr (sizeof(t) == 2) {
      if (parameters == DType::f32) return f(t, float());
    }
    return f(t, t);
  });
}

// Adds partial rows in order. Block: 32 columns by 16 runs of rows; grid.y: weight, bias.
template <typename A, typename P>
__global__ void __launch_bounds__(512)
    add_partials_kernel(const A* __restrict__ partials, P* __restrict__ grad_weight,
                        P* __restrict__ grad_bias, int64_t count, int64_t columns) {
  constexpr int kRuns = 16;
  P* target = blockIdx.y == 0 ? grad_weight : grad_bias;
  if (target == nullptr) return;
  const A* parts = partials + blockIdx.y * count * columns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  A total = A(0);
  if (column < columns) {
    for (int64_t row = threadIdx.y; row < count; row += kRuns) {
      total += parts[row * columns + column];
    }
  }
  __shared__ A runs[kRuns][kWarp];
  runs[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    A sum = A(0);
    for (int run = 0; run < kRuns; ++run) sum += runs[run][threadIdx.x];
    target[column] = narrow<P>(sum);
  }
}

// partials: [1 or 2, count, columns]; either gradient may be null.
template <typename A, typename P>
cudaError_t add_partials(const A* partials, P* grad_weight, P* grad_bias, int64_t count,
                         int64_t columns, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((columns + kWarp - 1) / kWarp);
  return enqueue(add_partials_kernel<A, P>, dim3(tiles, grad_bias == nullptr ? 1 : 2),
                 dim3(kWarp, 16), 0, stream, partials, grad_weight, grad_bias, count, columns);
}

}  // namespace
}  // namespace fusedops::cuda
