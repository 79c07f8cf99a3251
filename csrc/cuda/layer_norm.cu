// layer_norm on CUDA: a row comes from the input and its gradient goes to grad_input. The algorithm
// and its memory traffic are in layer_norm_kernels.cuh.
#include "layer_norm.h"

#include "layer_norm_kernels.cuh"

namespace fusedops::cuda {
namespace {

template <typename T>
struct PlainSource {
  using Element = T;
  static constexpr int kMostValues = 32;  // a thread holds without spilling
  const T* input;

  template <int N>
  __device__ __forceinline__ void load(int64_t offset, Acc<T> (&values)[N]) const {
    cuda::load(input + offset, values);
  }
  template <int N>
  __device__ __forceinline__ void reload(int64_t offset, Acc<T> (&values)[N]) const {
    cuda::load(input + offset, values);
  }
  bool aligned() const { return cuda::aligned(input); }
};

template <typename T>
struct PlainSink {
  T* grad_input;  // or null

  __host__ __device__ bool wanted() const { return grad_input != nullptr; }
  template <int N>
  __device__ __forceinline__ void store(int64_t offset, const Acc<T> (&dx)[N]) const {
    cuda::store(grad_input + offset, dx);
  }
  bool aligned() const { return cuda::aligned(grad_input); }
};

}  // namespace

cudaError_t layer_norm_forward(const LayerNormForward& a, cudaStream_t stream) {
  return switch_types(a.dtype, a.parameter_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    return ForwardCall<PlainSource<T>, P>{{static_cast<const T*>(a.input)},
                                          static_cast<const P*>(a.weight),
                                          static_cast<const P*>(a.bias),
                                          static_cast<T*>(a.output),
                                          static_cast<Acc<T>*>(a.mean),
                                          static_cast<Acc<T>*>(a.rstd),
                                          a.rows,
                                          a.columns,
                                          a.eps,
                                          stream}
        .launch();
  });
}

cudaError_t layer_norm_backward(const LayerNormBackward& a, cudaStream_t stream) {
  return switch_types(a.dtype, a.parameter_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    return BackwardCall<PlainSink<T>, T, P>{
        {static_cast<const T*>(a.grad_output), static_cast<const T*>(a.input),
         static_cast<const P*>(a.weight), static_cast<const Acc<T>*>(a.mean),
         static_cast<const Acc<T>*>(a.rstd), a.rows, a.columns},
        {static_cast<T*>(a.grad_input)},
        static_cast<P*>(a.grad_weight),
        static_cast<P*>(a.grad_bias),
        static_cast<Acc<T>*>(a.partials),
        stream}
        .launch();
  });
}

int64_t partial_rows(int64_t rows, int64_t columns, Type dtype) {
  return count_partials(rows, columns, dtype == Type::f64 ? kValuesOf<double> : kValuesOf<float>);
}

}  // namespace fusedops::cuda
