// add_layer_norm and add_rms_norm on CUDA: the norms' kernels over rows that are the sum of two.
//
// Forward: a row of summed = residual + dropout(input) is formed in registers, rounded, written and
// normalised. Traffic: two rows in, two rows out. Backward: the row gradient of the norm plus
// that of `summed` is the gradient of the residual, and with the dropout mask drawn again that of
// the input. Traffic: summed and up to two gradients in, up to two out.
#include "norm.h"
#include "norm_kernels.cuh"
#include "philox.cuh"

namespace fusedops::cuda {
namespace {

template <typename T, typename S>
struct ResidualSource {
  using Element = T;
  static constexpr int kMostValues = sizeof(T) == 2 ? 32 : 16;  // a thread holds without spilling
  const S* input;
  const T* residual;
  T* summed;
  DropoutArguments dropout;

  __device__ __forceinline__ int64_t place(int64_t start) const { return place_of(dropout, start); }
  template <int N>
  __device__ __forceinline__ void load(int64_t offset, int64_t place, Acc<T> (&values)[N]) const {
    Acc<T> stream[N];
    cuda::load(input + offset, values);
    cuda::load(residual + offset, stream);
    drop(dropout, place, values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = widen<Acc<T>>(narrow<T>(stream[i] + values[i]));  // normed is of the rounded sum
    }
    cuda::store(summed + offset, values);
  }
  template <int N>
  __device__ __forceinline__ void reload(int64_t offset, Acc<T> (&values)[N]) const {
    cuda::load(static_cast<const T*>(summed) + offset, values);
  }
  bool aligned() const {
    return cuda::aligned(input) && cuda::aligned(residual) && cuda::aligned(summed);
  }
};

template <typename T, typename S>
struct ResidualSink {
  const T* grad_summed;  // or null
  T* grad_residual;      // or null
  S* grad_input;         // or null
  DropoutArguments dropout;

  __host__ __device__ bool wanted() const {
    return grad_residual != nullptr || grad_input != nullptr;
  }
  __device__ __forceinline__ int64_t place(int64_t start) const { return place_of(dropout, start); }
  template <int N>
  __device__ __forceinline__ void store(int64_t offset, int64_t place,
                                        const Acc<T> (&dx)[N]) const {
    Acc<T> total[N];
    load_or<N>(grad_summed, offset, Acc<T>(0), total);
#pragma unroll
    for (int i = 0; i < N; ++i) total[i] += dx[i];
    if (grad_residual != nullptr) cuda::store(grad_residual + offset, total);
    if (grad_input != nullptr) {
      drop(dropout, place, total);
      cuda::store(grad_input + offset, total);
    }
  }
  bool aligned() const {
    return cuda::aligned(grad_summed) && cuda::aligned(grad_residual) && cuda::aligned(grad_input);
  }
};

// The gradients where `normed` has none: only that of `summed` passes.
template <typename T, typename S, int kPack>
__global__ void __launch_bounds__(256) pass_kernel(ResidualSink<T, S> sink, int64_t count) {
  const int64_t offset = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (offset >= count) return;
  const Acc<T> nothing[kPack] = {};
  sink.store(offset, sink.place(offset), nothing);
}

template <typename T, typename S>
cudaError_t pass(const ResidualSink<T, S>& sink, int64_t rows, int64_t columns,
                 cudaStream_t stream) {
  if (sink.grad_residual == nullptr && sink.grad_input == nullptr) return cudaSuccess;
  constexpr int kPack = kPackOf<T>;
  const int64_t count = rows * columns;
  // A pack lies within a row where rows stand anywhere.
  if ((sink.dropout.placed ? columns : count) % kPack == 0 && sink.aligned()) {
    const auto blocks = static_cast<unsigned>((count + 256 * kPack - 1) / (256 * kPack));
    return enqueue(pass_kernel<T, S, kPack>, blocks, 256, 0, stream, sink, count);
  }
  const auto blocks = static_cast<unsigned>((count + 255) / 256);
  return enqueue(pass_kernel<T, S, 1>, blocks, 256, 0, stream, sink, count);
}

// Calls f(T(), S()) with the type of the input too: T, or a half with float.
template <typename F>
cudaError_t switch_both(DType data, DType input, const F& f) {
  return switch_type(data, [&](auto t) {
    if constexpr (std::is_same_v<decltype(t), float>) {
      if (input == DType::f16) return f(t, __half());
      if (input == DType::bf16) return f(t, __nv_bfloat16());
    }
    return f(t, t);
  });
}

}  // namespace

cudaError_t add_norm_forward(const NormForward& a, cudaStream_t stream) {
  return switch_both(a.dtype, a.input_dtype, [&](auto t, auto s) {
    using T = decltype(t);
    using S = decltype(s);
    return ForwardCall<ResidualSource<T, S>>{
        {static_cast<const S*>(a.input), static_cast<const T*>(a.residual),
         static_cast<T*>(a.summed), a.dropout},
        forward_parameters<T>(a),
        forward_results<T>(a),
        a.rows,
        a.columns,
        a.eps,
        stream}
        .launch();
  });
}

cudaError_t add_norm_backward(const NormBackward& a, cudaStream_t stream) {
  return switch_both(a.dtype, a.input_dtype, [&](auto t, auto s) {
    using T = decltype(t);
    using S = decltype(s);
    const ResidualSink<T, S> sink{static_cast<const T*>(a.grad_summed),
                                  static_cast<T*>(a.grad_residual), static_cast<S*>(a.grad_input),
                                  a.dropout};
    if (a.grad_output == nullptr) return pass(sink, a.rows, a.columns, stream);
    return BackwardCall<ResidualSink<T, S>, T>{backward_rows<T>(a),
                                               sink,
                                               a.grad_weight,
                                               a.grad_bias,
                                               static_cast<Acc<T>*>(a.partials),
                                               stream}
        .launch();
  });
}

}  // namespace fusedops::cuda
