// bias_gelu on CUDA: y = act(x + bias), the sum and the activation in float32, rounded once.
//
// A thread owns 16 bytes of columns, keeps their bias in registers and walks rows. Forward traffic:
// x once, y once. Backward traffic: dy and x once, dx once, with
//   dx = dy * act'(x + bias),  dbias = sum over rows of dx (before its rounding):
// each thread keeps the part of dbias that its rows give in registers and writes it once, and a
// second kernel adds the parts in order: no atomics, the same bits in every run.
//
// No figure here is measured yet; registers and spills are in docs/reports/cuda_kernels.csv.
#include <algorithm>
#include <type_traits>

#include "activation.cuh"
#include "bias_gelu.h"
#include "launch.cuh"

namespace fusedops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerThread = 4;   // of the forward
constexpr int kRowsPerPart = 16;    // of the backward, at least
constexpr int kBlocksPerChip = 16;  // of the backward, for each multiprocessor

template <typename T, typename P, Activation kActivation, int kPack>
__global__ void __launch_bounds__(kThreads)
    bias_gelu_kernel(const T* __restrict__ input, const P* __restrict__ bias,
                     T* __restrict__ output, int64_t rows, int64_t columns) {
  using A = Acc<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (column >= columns) return;
  A shift[kPack];
  load(bias + column, shift);
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
#pragma unroll(std::is_same_v<T, double> ? 1 : 2)
  for (; row < rows; row += step) {
    A x[kPack];
    load(input + row * columns + column, x);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] = gelu_value<kActivation>(x[i] + shift[i]);
    store(output + row * columns + column, x);
  }
}

template <typename T, typename P, Activation kActivation, int kPack>
__global__ void __launch_bounds__(kThreads)
    bias_gelu_backward_kernel(const T* __restrict__ grad_output, const T* __restrict__ input,
                              const P* __restrict__ bias, T* __restrict__ grad_input,
                              Acc<T>* __restrict__ partials, int64_t rows, int64_t columns) {
  using A = Acc<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (column >= columns) return;
  A shift[kPack];
  A total[kPack] = {};
  load(bias + column, shift);
  const int64_t parts = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const int64_t part = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
#pragma unroll(std::is_same_v<T, double> ? 1 : 2)
  for (int64_t row = part; row < rows; row += parts) {
    A x[kPack], dy[kPack];
    load(input + row * columns + column, x);
    load(grad_output + row * columns + column, dy);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      // Not contracted into the sum: it has the same bits where grad_input is not wanted.
      dy[i] = multiply(dy[i], gelu_slope<kActivation>(x[i] + shift[i]));
      total[i] += dy[i];
    }
    if (grad_input != nullptr) store(grad_input + row * columns + column, dy);
  }
  if (partials != nullptr) store(partials + part * columns + column, total);
}

// Threads over columns by rows of a block, and blocks over columns.
struct Shape {
  Shape(int64_t columns, int pack) {
    const int64_t packs = (columns + pack - 1) / pack;
    unsigned x = kWarp;
    while (x < kThreads && x < packs) x *= 2;
    block = dim3(x, kThreads / x);
    tiles = static_cast<unsigned>((packs + x - 1) / x);
  }
  // Partial rows of the bias gradient: one for each row of threads.
  static int64_t parts(int64_t rows, int64_t columns, int pack) {
    const Shape shape(columns, pack);
    int device = 0;
    int multiprocessors = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const int64_t per_block = int64_t{kRowsPerPart} * shape.block.y;
    const int64_t most = std::max<int64_t>(1, kBlocksPerChip * multiprocessors / shape.tiles);
    return std::min((rows + per_block - 1) / per_block, most) * shape.block.y;
  }
  dim3 block;
  unsigned tiles;
};

template <typename T, typename P, Activation kActivation, int kPack>
cudaError_t launch(const BiasGeluForward& a, cudaStream_t stream) {
  const Shape shape(a.columns, kPack);
  const int64_t per_block = int64_t{kRowsPerThread} * shape.block.y;
  const auto blocks = std::min<int64_t>((a.rows + per_block - 1) / per_block, 65535);
  return enqueue(bias_gelu_kernel<T, P, kActivation, kPack>,
                 dim3(shape.tiles, static_cast<unsigned>(blocks)), shape.block, 0, stream,
                 static_cast<const T*>(a.input), static_cast<const P*>(a.bias),
                 static_cast<T*>(a.output), a.rows, a.columns);
}

template <typename T, typename P, Activation kActivation, int kPack>
cudaError_t launch(const BiasGeluBackward& a, cudaStream_t stream) {
  // A thread owns one column of doubles: two spill on sm_100.
  constexpr int kColumns = std::is_same_v<T, double> ? 1 : kPack;
  const Shape shape(a.columns, kColumns);
  const int64_t parts = bias_gelu_partials(a.rows, a.columns, a.dtype);
  // As many parts whatever the pack: both heights of a block are powers of two, and parts are a
  // multiple of the larger one.
  const auto blocks = static_cast<unsigned>(parts / shape.block.y);
  auto* partials = a.grad_bias != nullptr ? static_cast<Acc<T>*>(a.partials) : nullptr;
  const auto error = enqueue(
      bias_gelu_backward_kernel<T, P, kActivation, kColumns>, dim3(shape.tiles, blocks),
      shape.block, 0, stream, static_cast<const T*>(a.grad_output), static_cast<const T*>(a.input),
      static_cast<const P*>(a.bias), static_cast<T*>(a.grad_input), partials, a.rows, a.columns);
  if (error != cudaSuccess || partials == nullptr) return error;
  return add_partials<Acc<T>, P>(partials, static_cast<P*>(a.grad_bias), nullptr, parts, a.columns,
                                 stream);
}

template <typename Call>
cudaError_t run(const Call& a, bool pointers_aligned, cudaStream_t stream) {
  return switch_types(a.dtype, a.bias_dtype, [&](auto t, auto p) {
    using T = decltype(t);
    using P = decltype(p);
    return switch_gelu(a.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      const bool vector = pointers_aligned && a.columns % kPackOf<T> == 0;
      return vector ? launch<T, P, kActivation, kPackOf<T>>(a, stream)
                    : launch<T, P, kActivation, 1>(a, stream);
    });
  });
}

}  // namespace

int64_t bias_gelu_partials(int64_t rows, int64_t columns, DType dtype) {
  const int size = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
  return Shape::parts(rows, columns, 16 / size);
}

cudaError_t bias_gelu_forward(const BiasGeluForward& a, cudaStream_t stream) {
  return run(a, aligned(a.input) && aligned(a.bias) && aligned(a.output), stream);
}

cudaError_t bias_gelu_backward(const BiasGeluBackward& a, cudaStream_t stream) {
  const bool fits = aligned(a.grad_output) && aligned(a.input) && aligned(a.bias) &&
                    aligned(a.grad_input) && aligned(a.partials);
  return run(a, fits, stream);
}

}  // namespace fusedops::cuda
