// What the sources under csrc/cuda find in place of nvcc: g++ reads this ahead of each .cu file,
// and every thread of a launch is then a fiber of machine.cpp. Types and conversions are those of
// the toolkit's headers. A kernel that uses what is not here does not compile.
//
// Shared memory is thread-local memory of this library, as that is a storage class which `extern`
// may stand before; all fibers run on the thread that launches, so a block shares it.
#pragma once

#include <cuda_runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "machine.h"

#undef __shared__
#define __shared__ thread_local
#define __launch_bounds__(...)

#define threadIdx (::cuda_on_host::thread_index())
#define blockIdx (::cuda_on_host::block_index())
#define blockDim (::cuda_on_host::block_size())
#define gridDim (::cuda_on_host::grid_size())

#define cudaLaunchKernelEx(...) ::cuda_on_host::launch_kernel(__VA_ARGS__)

namespace cuda_on_host {

// A kernel and its arguments, which each thread gets a copy of.
template <typename... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;

  static void run(const void* call) {
    const auto* self = static_cast<const Call*>(call);
    std::apply(self->kernel, self->arguments);
  }
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                          const Arguments&... arguments) {
  const Call<Parameters...> call{kernel, {static_cast<Parameters>(arguments)...}};
  return launch(*config, Call<Parameters...>::run, &call, sizeof(call));
}

template <typename T>
T shuffle(unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, static_cast<unsigned>(source), place);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_on_host

inline void __syncthreads(cuda_on_host::Place place = cuda_on_host::Place::current()) {
  cuda_on_host::meet_block(place);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits,
                  cuda_on_host::Place place = cuda_on_host::Place::current()) {
  return cuda_on_host::shuffle(mask, value, static_cast<int>(cuda_on_host::lane()) ^ bits, place);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
// No product is contracted to a fused multiply-add here (-ffp-contract=off).
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
// As the hardware's: a divisor above 2^126 has the reciprocal 0.
inline float __fdividef(float a, float b) {
  return std::fabs(b) > 0x1p126f && std::isfinite(b) ? 0.0f * a : a / b;
}
