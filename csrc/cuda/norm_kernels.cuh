// The kernels of the norms. What differs between the plain norms and those that add is where a row
// comes from (a Source) and where its gradient goes (a Sink); layer norm and RMS norm differ by
// whether rows are centred, which a block asks at run time, as it asks for the parameters' dtype:
// the kernels wait for memory, and each would double the template instances.
//
// Forward: a row is in the registers of one warp (up to 1024 columns) or one block (up to 32768;
// those that add, in float32, up to 512 and 16384, what fits without spilling).
// Mean, then centred sums; the sum of the deviations corrects the rounding of the mean, so a mean
// of 1e4 with deviation 1 stays right. Traffic: the row once in, once out. Longer rows are read
// three times, the second and third time from the L2 cache.
//
// Backward, with xhat = (x - mean) * rstd and h = dy * weight:
//   dx      = rstd * (h - mean(h) - xhat * mean(h * xhat))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// where mean and mean(h) are missing when rows are not centred.
// A number of blocks that depends on the GPU and on the sizes alone walks the rows; each thread
// keeps the parameter gradients of its columns in registers and writes them once, to a row of
// partial sums of its block. A second kernel adds those in order: no atomics, the same bits in
// every run. Traffic: x and dy once in, dx once out. Above 8192 columns dx and the partial sums are
// two kernels.
//
// Columns that are no multiple of a 16-byte pack, and pointers that are not aligned to one, are
// read element by element; these rows and those of doubles stay in registers up to a lower limit.
//
// No figure here is measured yet; registers and spills are in docs/reports/cuda_kernels.csv.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device.cuh"
#include "launch.cuh"
#include "norm.h"

namespace fusedops::cuda {
namespace {

constexpr int kLongThreads = 1024;

// Values that a thread holds: always in the backward, at least in the forward.
template <typename T>
constexpr int kValuesOf = std::is_same_v<T, double> ? 4 : 8;
// Threads of the forward's blocks at most: with 1024 a thread has 64 registers, and 32 values spill
// on sm_120.
template <int kValues>
constexpr int kForwardThreads = kValues >= 32 ? 512 : 1024;
// Threads of the backward's blocks at most: what leaves enough registers for no spill.
template <typename T, int kPack>
constexpr int kBackwardThreads = kPack == 1 || std::is_same_v<T, double> ? 512 : 1024;

// The parameters of a norm: of type T, or all wide.
template <typename T>
struct Parameters {
  const void* weight;  // or null
  const void* bias;    // or null
  bool wide;
  Acc<T> weight_offset;

  template <int N>
  __device__ __forceinline__ void load_scale(int64_t column, Acc<T> (&values)[N]) const {
    load_either(weight, column, Acc<T>(1), values);
    if (weight == nullptr) return;
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += weight_offset;
  }
  template <int N>
  __device__ __forceinline__ void load_shift(int64_t column, Acc<T> (&values)[N]) const {
    load_either(bias, column, Acc<T>(0), values);
  }
  bool aligned() const { return cuda::aligned(weight) && cuda::aligned(bias); }

 private:
  template <int N>
  __device__ __forceinline__ void load_either(const void* from, int64_t column, Acc<T> absent,
                                              Acc<T> (&values)[N]) const {
    if (wide) {
      load_or(static_cast<const Acc<T>*>(from), column, absent, values);
    } else {
      load_or(static_cast<const T*>(from), column, absent, values);
    }
  }
};

// ------------------------------------------------------------------------------------ forward

template <typename T>
struct Results {
  void* output;
  bool wide;         // output has the accumulation dtype, else T
  bool round_first;  // to T, before the weight
  Acc<T>* mean;      // or null: rows are not centred
  Acc<T>* rstd;

  // Writes the row's elements from `place` on: values * rstd, scaled and shifted.
  template <int N>
  __device__ __forceinline__ void store_row(int64_t place, Acc<T> rstd_of_row,
                                            const Acc<T> (&scale)[N], const Acc<T> (&shift)[N],
                                            Acc<T> (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Acc<T> normalized = multiply(values[i], rstd_of_row);
      if (round_first) normalized = widen<Acc<T>>(narrow<T>(normalized));
      values[i] = normalized * scale[i] + shift[i];
    }
    if (wide) {
      store(static_cast<Acc<T>*>(output) + place, values);
    } else {
      store(static_cast<T*>(output) + place, values);
    }
  }
};

template <typename Source, int kPack, int kVectors>
__global__ void __launch_bounds__(kForwardThreads<kPack * kVectors>, 1)
    forward_kernel(Source source, Parameters<typename Source::Element> parameters,
                   Results<typename Source::Element> results, int64_t rows, int columns,
                   Acc<typename Source::Element> eps) {
  using A = Acc<typename Source::Element>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t start = row * columns;
  const int64_t place = source.place(start);
  const int step = static_cast<int>(blockDim.x) * kPack;
  const int first = static_cast<int>(threadIdx.x) * kPack;
  const int end = row < rows ? columns : 0;  // a row past the last one has no columns
  const bool centred = results.mean != nullptr;

  A values[kVectors][kPack];
  A sum[1] = {A(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if (column < end) {
      source.load(start + column, place + column, values[v]);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[0] += values[v][i];
    }
  }
  if (centred) sum_over_row(sum, 0);
  const A mean = centred ? sum[0] / static_cast<A>(columns) : A(0);

  A moments[2] = {A(0), A(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * step < end) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[v][i] -= mean;
        moments[0] += values[v][i];
        moments[1] += values[v][i] * values[v][i];
      }
    }
  }
  sum_over_row(moments, 1);
  const A correction = centred ? moments[0] / static_cast<A>(columns) : A(0);
  const A variance = moments[1] / static_cast<A>(columns) - correction * correction;
  const A rstd = inverse_root(not_negative(variance) + eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if (column < end) {
      A scale[kPack], shift[kPack];
      parameters.load_scale(column, scale);
      parameters.load_shift(column, shift);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[v][i] -= correction;
      results.store_row(start + column, rstd, scale, shift, values[v]);
    }
  }
  if (threadIdx.x == 0 && row < rows) {
    if (centred) results.mean[row] = mean + correction;
    results.rstd[row] = rstd;
  }
}

template <typename Source, int kPack>
__global__ void __launch_bounds__(kLongThreads, 1)
    forward_long_kernel(Source source, Parameters<typename Source::Element> parameters,
                        Results<typename Source::Element> results, int64_t columns,
                        Acc<typename Source::Element> eps) {
  using A = Acc<typename Source::Element>;
  const int64_t row = blockIdx.x;
  const int64_t start = row * columns;
  const int64_t place = source.place(start);
  constexpr int64_t step = kLongThreads * kPack;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kPack;
  const bool centred = results.mean != nullptr;

  A sums[2] = {A(0), A(0)};  // of the values, of their squares
  for (int64_t column = first; column < columns; column += step) {
    A values[kPack];
    source.load(start + column, place + column, values);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sums[0] += values[i];
      sums[1] += values[i] * values[i];
    }
  }
  sum_over_row(sums, 0);
  A mean = A(0);
  A correction = A(0);
  A variance = sums[1] / static_cast<A>(columns);
  if (centred) {
    mean = sums[0] / static_cast<A>(columns);
    // A thread rereads its own columns only, so what the source wrote is visible to it.
    A moments[2] = {A(0), A(0)};
    for (int64_t column = first; column < columns; column += step) {
      A values[kPack];
      source.reload(start + column, values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[i] -= mean;
        moments[0] += values[i];
        moments[1] += values[i] * values[i];
      }
    }
    sum_over_row(moments, 1);
    correction = moments[0] / static_cast<A>(columns);
    variance = moments[1] / static_cast<A>(columns) - correction * correction;
  }
  const A rstd = inverse_root(not_negative(variance) + eps);

  for (int64_t column = first; column < columns; column += step) {
    A values[kPack], scale[kPack], shift[kPack];
    source.reload(start + column, values);
    parameters.load_scale(column, scale);
    parameters.load_shift(column, shift);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = (values[i] - mean) - correction;
    results.store_row(start + column, rstd, scale, shift, values);
  }
  if (threadIdx.x == 0) {
    if (centred) results.mean[row] = mean + correction;
    results.rstd[row] = rstd;
  }
}

// ----------------------------------------------------------------------------------- backward

// What the backward of a row reads.
template <typename T>
struct BackwardRows {
  const T* grad_output;
  const T* input;
  Parameters<T> parameters;
  const Acc<T>* mean;  // or null: rows were not centred
  const Acc<T>* rstd;
  int64_t rows;
  int64_t columns;
};

template <typename Sink, typename T, int kPack, int kVectors>
__global__ void __launch_bounds__(kBackwardThreads<T, kPack>, 1)
    backward_kernel(BackwardRows<T> in, Sink sink, Acc<T>* __restrict__ grad_weight,
                    Acc<T>* __restrict__ grad_bias) {
  using A = Acc<T>;
  const int columns = static_cast<int>(in.columns);
  const int step = static_cast<int>(blockDim.x) * kPack;
  const int first = static_cast<int>(threadIdx.x) * kPack;
  const bool wants_input = sink.wanted();
  const bool centred = in.mean != nullptr;
  A dweight[kVectors][kPack] = {};
  A dbias[kVectors][kPack] = {};
  int turn = 0;
  // All threads of a block make the same number of turns: they meet at the barrier in sum_over_row.
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.y; base < in.rows;
       base += static_cast<int64_t>(gridDim.x) * blockDim.y, turn ^= 1) {
    const int64_t row = base + threadIdx.y;
    const bool active = row < in.rows;
    const int64_t start = row * columns;
    const int end = active ? columns : 0;
    const A mean = active && centred ? in.mean[row] : A(0);
    const A rstd = active ? in.rstd[row] : A(0);
    const int64_t place = sink.place(start);
    Pack<T, kPack> x[kVectors];
    Pack<T, kPack> dy[kVectors];
    A sums[2] = {A(0), A(0)};  // of h, of h * xhat
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      if (column < end) {
        x[v] = load_pack<T, kPack>(in.input + start + column);
        dy[v] = load_pack<T, kPack>(in.grad_output + start + column);
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      if (column < end) {
        A weight[kPack];
        in.parameters.load_scale(column, weight);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const A grad = widen<A>(dy[v].at[i]);
          const A normalized = (widen<A>(x[v].at[i]) - mean) * rstd;
          dweight[v][i] += grad * normalized;
          dbias[v][i] += grad;
          sums[0] += grad * weight[i];
          sums[1] += grad * weight[i] * normalized;
        }
      }
    }
    if (!wants_input) continue;
    sum_over_row(sums, turn);
    const A across = centred ? sums[0] / static_cast<A>(columns) : A(0);
    const A along = sums[1] / static_cast<A>(columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      if (column < end) {
        A weight[kPack], dx[kPack];
        in.parameters.load_scale(column, weight);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const A normalized = (widen<A>(x[v].at[i]) - mean) * rstd;
          dx[i] = rstd * (widen<A>(dy[v].at[i]) * weight[i] - across - normalized * along);
        }
        sink.store(start + column, place + column, dx);
      }
    }
  }
  // The rows of threads of the block add their parts in order, through shared memory.
  A* parts = dynamic_shared<A>();
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    A* target = which == 0 ? grad_weight : grad_bias;
    if (target == nullptr) continue;
    target += static_cast<int64_t>(blockIdx.x) * columns;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * step;
      if (column < columns) {
        A* place = blockDim.y == 1 ? target : parts + threadIdx.y * columns;
        store(place + column, which == 0 ? dweight[v] : dbias[v]);
      }
    }
    if (blockDim.y == 1) continue;
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); column < columns;
         column += threads) {
      A total = A(0);
      for (unsigned y = 0; y < blockDim.y; ++y) total += parts[y * columns + column];
      target[column] = total;
    }
  }
}

template <typename Sink, typename T, int kPack>
__global__ void __launch_bounds__(kLongThreads, 1)
    backward_input_long_kernel(BackwardRows<T> in, Sink sink) {
  using A = Acc<T>;
  const int64_t row = blockIdx.x;
  const int64_t start = row * in.columns;
  const int64_t place = sink.place(start);
  constexpr int64_t step = kLongThreads * kPack;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kPack;
  const bool centred = in.mean != nullptr;
  const A mean = centred ? in.mean[row] : A(0);
  const A rstd = in.rstd[row];
  A sums[2] = {A(0), A(0)};
  for (int64_t column = first; column < in.columns; column += step) {
    A x[kPack], dy[kPack], weight[kPack];
    load(in.input + start + column, x);
    load(in.grad_output + start + column, dy);
    in.parameters.load_scale(column, weight);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sums[0] += dy[i] * weight[i];
      sums[1] += dy[i] * weight[i] * (x[i] - mean) * rstd;
    }
  }
  sum_over_row(sums, 0);
  const A across = centred ? sums[0] / static_cast<A>(in.columns) : A(0);
  const A along = sums[1] / static_cast<A>(in.columns);
  for (int64_t column = first; column < in.columns; column += step) {
    A x[kPack], dy[kPack], weight[kPack];
    load(in.input + start + column, x);
    load(in.grad_output + start + column, dy);
    in.parameters.load_scale(column, weight);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      x[i] = rstd * (dy[i] * weight[i] - across - (x[i] - mean) * rstd * along);
    }
    sink.store(start + column, place + column, x);
  }
}

// Grid: column tiles by partial rows; a thread owns kPack columns.
template <typename T, int kPack>
__global__ void __launch_bounds__(256)
    partial_sums_kernel(BackwardRows<T> in, Acc<T>* __restrict__ grad_weight,
                        Acc<T>* __restrict__ grad_bias) {
  using A = Acc<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (column >= in.columns) return;
  A dweight[kPack] = {};
  A dbias[kPack] = {};
  for (int64_t row = blockIdx.y; row < in.rows; row += gridDim.y) {
    A x[kPack], dy[kPack];
    load(in.input + row * in.columns + column, x);
    load(in.grad_output + row * in.columns + column, dy);
    const A mean = in.mean != nullptr ? in.mean[row] : A(0);
    const A rstd = in.rstd[row];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      dweight[i] += dy[i] * (x[i] - mean) * rstd;
      dbias[i] += dy[i];
    }
  }
  const int64_t place = static_cast<int64_t>(blockIdx.y) * in.columns + column;
  if (grad_weight != nullptr) store(grad_weight + place, dweight);
  if (grad_bias != nullptr) store(grad_bias + place, dbias);
}

// ----------------------------------------------------------------------------------- launchers

inline int64_t rounded_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Threads of a row (whole warps) by rows of a block.
inline dim3 block_shape(int64_t columns, int64_t values, int64_t threads) {
  const int64_t x = rounded_up((columns + values - 1) / values, kWarp);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(std::max<int64_t>(1, threads / x)));
}

// Partial rows: one per block of the backward, two blocks a multiprocessor.
inline int64_t count_partials(int64_t rows, int64_t columns, int64_t values) {
  int device = 0;
  int multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t per_task = columns > 1024 * values ? 1 : block_shape(columns, values, 512).y;
  return std::min<int64_t>((rows + per_task - 1) / per_task, 2 * multiprocessors);
}

template <typename T>
Parameters<T> forward_parameters(const NormForward& a) {
  return {a.weight, a.bias, a.parameter_dtype != a.dtype, static_cast<Acc<T>>(a.weight_offset)};
}

template <typename T>
Results<T> forward_results(const NormForward& a) {
  return {a.output, a.output_dtype != a.dtype, a.round_before_weight, static_cast<Acc<T>*>(a.mean),
          static_cast<Acc<T>*>(a.rstd)};
}

template <typename T>
BackwardRows<T> backward_rows(const NormBackward& a) {
  return {static_cast<const T*>(a.grad_output),
          static_cast<const T*>(a.input),
          {a.weight, nullptr, a.parameter_dtype != a.dtype, static_cast<Acc<T>>(a.weight_offset)},
          static_cast<const Acc<T>*>(a.mean),
          static_cast<const Acc<T>*>(a.rstd),
          a.rows,
          a.columns};
}

template <typename Source>
struct ForwardCall {
  using T = typename Source::Element;
  Source source;
  Parameters<T> parameters;
  Results<T> results;
  int64_t rows;
  int64_t columns;
  double eps;
  cudaStream_t stream;

  cudaError_t launch() const {
    const bool vector = columns % kPackOf<T> == 0 && source.aligned() && parameters.aligned() &&
                        aligned(results.output);
    return vector ? launch_packed<kPackOf<T>>() : launch_packed<1>();
  }

 private:
  template <int kPack>
  cudaError_t launch_packed() const {
    constexpr int kFew = kValuesOf<T>;
    if constexpr (kPack == 1 || std::is_same_v<T, double>) {
      if (columns <= 1024 * kFew) return run<kPack, kFew>();
    } else {
      // One warp a row while it can hold it, then a block a row.
      constexpr int kMost = Source::kMostValues;
      const bool one_warp = columns <= kWarp * kMost;
      if (columns <= kWarp * 8 || (!one_warp && columns <= 4096)) return run<kPack, 8>();
      if (columns <= kWarp * 16 || (!one_warp && columns <= 16384)) return run<kPack, 16>();
      if constexpr (kMost == 32) {
        if (one_warp) return run<kPack, 32>();
        if (columns <= 512 * 64) return run<kPack, 64>();
      }
    }
    return enqueue(forward_long_kernel<Source, kPack>, static_cast<unsigned>(rows), kLongThreads, 0,
                   stream, source, parameters, results, columns, static_cast<Acc<T>>(eps));
  }

  template <int kPack, int kValues>
  cudaError_t run() const {
    const dim3 block = block_shape(columns, kValues, 256);
    const auto grid = static_cast<unsigned>((rows + block.y - 1) / block.y);
    return enqueue(forward_kernel<Source, kPack, kValues / kPack>, grid, block, 0, stream, source,
                   parameters, results, rows, static_cast<int>(columns), static_cast<Acc<T>>(eps));
  }
};

template <typename Sink, typename T>
struct BackwardCall {
  BackwardRows<T> in;
  Sink sink;
  void* grad_weight;
  void* grad_bias;
  Acc<T>* partials;  // [2, count, columns]
  cudaStream_t stream;

  cudaError_t launch() const {
    const bool vector = in.columns % kPackOf<T> == 0 && sink.aligned() &&
                        cuda::aligned(in.grad_output) && cuda::aligned(in.input) &&
                        in.parameters.aligned() && cuda::aligned(partials);
    return vector ? launch_packed<kPackOf<T>>() : launch_packed<1>();
  }

 private:
  template <int kPack>
  cudaError_t launch_packed() const {
    constexpr int kValues = kValuesOf<T>;
    const int64_t count = count_partials(in.rows, in.columns, kValues);
    Acc<T>* weight_parts = grad_weight != nullptr ? partials : nullptr;
    Acc<T>* bias_parts = grad_bias != nullptr ? partials + count * in.columns : nullptr;
    const bool parameters = weight_parts != nullptr || bias_parts != nullptr;
    if (in.columns <= kBackwardThreads<T, kPack> * kValues) {
      const dim3 block = block_shape(in.columns, kValues, 512);
      const size_t shared = block.y > 1 ? block.y * in.columns * sizeof(Acc<T>) : 0;
      const auto error =
          enqueue(backward_kernel<Sink, T, kPack, kValues / kPack>, static_cast<unsigned>(count),
                  block, shared, stream, in, sink, weight_parts, bias_parts);
      if (error != cudaSuccess) return error;
    } else {
      if (sink.wanted()) {
        const auto error =
            enqueue(backward_input_long_kernel<Sink, T, kPack>, static_cast<unsigned>(in.rows),
                    kLongThreads, 0, stream, in, sink);
        if (error != cudaSuccess) return error;
      }
      if (parameters) {
        const auto tiles = static_cast<unsigned>((in.columns + 256 * kPack - 1) / (256 * kPack));
        const auto error =
            enqueue(partial_sums_kernel<T, kPack>, dim3(tiles, static_cast<unsigned>(count)), 256,
                    0, stream, in, weight_parts, bias_parts);
        if (error != cudaSuccess) return error;
      }
    }
    if (!parameters) return cudaSuccess;
    return in.parameters.wide ? add_parts<Acc<T>>(count) : add_parts<T>(count);
  }

  template <typename P>
  cudaError_t add_parts(int64_t count) const {
    return add_partials<Acc<T>, P>(partials, static_cast<P*>(grad_weight),
                                   static_cast<P*>(grad_bias), count, in.columns, stream);
  }
};

}  // namespace
}  // namespace fusedops::cuda
