// layer_norm and rms_norm on CUDA: a row comes from the input and its gradient goes to grad_input.
// The algorithm and its memory traffic are in norm_kernels.cuh.
#include "norm.h"

#include "norm_kernels.cuh"

namespace fusedops::cuda {
namespace {

template <typename T>
struct PlainSource {
  using Element = T;
  static constexpr int kMostValues = 32;  // a thread holds without spilling
  const T* input;

  __device__ __forceinline__ int64_t place(int64_t start) const { return start; }
  template <int N>
  __device__ __forceinline__ void load(int64_t offset, int64_t, Acc<T> (&values)[N]) const {
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
  __device__ __forceinline__ int64_t place(int64_t start) const { return start; }
  template <int N>
  __device__ __forceinline__ void store(int64_t offset, int64_t, const Acc<T> (&dx)[N]) const {
    cuda::store(grad_input + offset, dx);
  }
  bool aligned() const { return cuda::aligned(grad_input); }
};

}  // namespace

cudaError_t norm_forward(const NormForward& a, cudaStream_t stream) {
  return switch_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    return ForwardCall<PlainSource<T>>{{static_cast<const T*>(a.input)},
                                       forward_parameters<T>(a),
                                       forward_results<T>(a),
                                       a.rows,
                                       a.columns,
                                       a.eps,
                                       stream}
        .launch();
  });
}

cudaError_t norm_backward(const NormBackward& a, cudaStream_t stream) {
  return switch_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    return BackwardCall<PlainSink<T>, T>{
        backward_rows<T>(a), {static_cast<T*>(a.grad_input)},  a.grad_weight,
        a.grad_bias,         static_cast<Acc<T>*>(a.partials), stream}
        .launch();
  });
}

int64_t partial_rows(int64_t rows, int64_t columns, DType dtype) {
  return count_partials(rows, columns, dtype == DType::f64 ? kValuesOf<double> : kValuesOf<float>);
}

}  // namespace fusedops::cuda
