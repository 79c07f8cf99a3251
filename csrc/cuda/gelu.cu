// gelu on CUDA: y = x * Phi(x), its tanh form, or x * sigmoid(1.702 x). One pass over memory each
// way, 16 bytes an access; tensors that are not aligned to that go element by element.
//
// No figure here is measured yet; registers and spills are in docs/reports/cuda_kernels.csv.
#include "gelu.h"

#include <type_traits>

#include "activation.cuh"
#include "launch.cuh"

namespace fusedops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacksPerThread = 2;
// Of a thread's packs, those at once: two of doubles spill on sm_100.
template <typename T>
constexpr int kUnrolled = std::is_same_v<T, double> ? 1 : kPacksPerThread;

// `grad_output` is null in the forward.
template <typename T, Activation kActivation, bool kBackward, int kPack>
__global__ void __launch_bounds__(kThreads)
    gelu_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                T* __restrict__ output, int64_t count) {
  using A = Acc<T>;
  const auto at = [](A x, A dy) {
    return kBackward ? dy * gelu_slope<kActivation>(x) : gelu_value<kActivation>(x);
  };
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kPacksPerThread * kThreads + threadIdx.x) * kPack;
#pragma unroll kUnrolled < T>
  for (int turn = 0; turn < kPacksPerThread; ++turn) {
    const int64_t offset = first + turn * kThreads * kPack;
    if (offset + kPack <= count) {
      A x[kPack];
      A dy[kPack] = {};
      load(input + offset, x);
      if constexpr (kBackward) load(grad_output + offset, dy);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = at(x[i], dy[i]);
      store(output + offset, x);
    } else {
      for (int64_t i = offset; i < count; ++i) {
        const A dy = kBackward ? widen<A>(grad_output[i]) : A(0);
        output[i] = narrow<T>(at(widen<A>(input[i]), dy));
      }
    }
  }
}

template <typename T, Activation kActivation, bool kBackward, int kPack>
cudaError_t launch(const Gelu& a, cudaStream_t stream) {
  constexpr int64_t kPerBlock = int64_t{kThreads} * kPacksPerThread * kPack;
  const auto blocks = static_cast<unsigned>((a.count + kPerBlock - 1) / kPerBlock);
  return enqueue(gelu_kernel<T, kActivation, kBackward, kPack>, blocks, kThreads, 0, stream,
                 static_cast<const T*>(a.grad_output), static_cast<const T*>(a.input),
                 static_cast<T*>(a.output), a.count);
}

}  // namespace

cudaError_t gelu(const Gelu& a, cudaStream_t stream) {
  const bool vector = aligned(a.grad_output) && aligned(a.input) && aligned(a.output);
  return switch_types(a.dtype, a.dtype, [&](auto t, auto) {
    using T = decltype(t);
    return switch_gelu(a.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      if (a.grad_output != nullptr) {
        return vector ? launch<T, kActivation, true, kPackOf<T>>(a, stream)
                      : launch<T, kActivation, true, 1>(a, stream);
      }
      return vector ? launch<T, kActivation, false, kPackOf<T>>(a, stream)
                    : launch<T, kActivation, false, 1>(a, stream);
    });
  });
}

}  // namespace fusedops::cuda
