// Kernels that each do one thing wrong, for the test of the watch; one is right. No part of the
// library.
#include "../../../csrc/cuda/device.cuh"
#include "../../../csrc/cuda/launch.cuh"
#include "runtime.h"

namespace fusedops::cuda {
namespace {

constexpr int kThreads = 64;

// Turns 64 numbers round twice, each block those of its own.
template <bool kFirstBarrier, bool kSecondBarrier>
__global__ void turn_round(float* x) {
  __shared__ float held[kThreads];
  float* own = x + blockIdx.x * kThreads;
  const int across = kThreads - 1 - static_cast<int>(threadIdx.x);
  held[threadIdx.x] = own[threadIdx.x];
  if (kFirstBarrier) __syncthreads();
  const float other = held[across];
  if (kSecondBarrier) __syncthreads();
  held[threadIdx.x] = other;
  __syncthreads();
  own[threadIdx.x] = held[across];
}

__global__ void barrier_in_a_branch(float* x) {
  if (threadIdx.x < kWarp) {
    x[threadIdx.x] = 1.0f;
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void barrier_of_a_few(float* x) {
  if (threadIdx.x == 0) __syncthreads();
  x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
}

template <unsigned kMask>
__global__ void shuffle(float* x, int lanes) {
  if (static_cast<int>(threadIdx.x) >= lanes) return;
  x[threadIdx.x] = __shfl_xor_sync(kMask, x[threadIdx.x], 1);
}

__global__ void one_too_many(float* x, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i <= count) x[i] *= 2.0f;
}

__global__ void pack_at(float* x, int64_t offset) {
  float values[4];
  load(x + offset, values);
  x[0] = values[0] + values[3];
}

__global__ void read_unwritten(float* x) {
  float* held = dynamic_shared<float>();
  if (threadIdx.x > 0) held[threadIdx.x] = 1.0f;
  __syncthreads();
  x[threadIdx.x] = held[threadIdx.x];
}

__global__ void write_dynamic(float* x) {
  float* held = dynamic_shared<float>();
  held[threadIdx.x] = 1.0f;
  x[threadIdx.x] = held[threadIdx.x];
}

__global__ void all_to_one(float* x) {
  if (threadIdx.x == 0) x[0] = static_cast<float>(blockIdx.x);
}

__global__ void index_past_array(float* x, int index) {
  __shared__ float held[2][kWarp];
  held[threadIdx.x / kWarp][threadIdx.x % kWarp] = 1.0f;
  __syncthreads();
  x[threadIdx.x] = held[0][index];
}

template <bool kMeets>
__global__ void lanes_of_a_warp(float* x) {
  __shared__ float held[kWarp];
  held[threadIdx.x] = x[threadIdx.x];
  if (kMeets) __syncwarp();
  x[threadIdx.x] = held[kWarp - 1 - threadIdx.x];
}

__global__ void all_lanes_to_one(float* x) {
  x[kWarp] = static_cast<float>(threadIdx.x);
}

cudaError_t run(int fault, float* x, int count) {
  constexpr unsigned kAll = 0xffffffffu;
  switch (fault) {
    case 0:
      for (int i = 0; i < 2; ++i) {
        const auto error = enqueue(lanes_of_a_warp<true>, 1, kWarp, 0, nullptr, x);
        if (error != cudaSuccess) return error;
      }
      return enqueue(turn_round<true, true>, count / kThreads, kThreads, 0, nullptr, x);
    case 1:
      return enqueue(turn_round<false, true>, 1, kThreads, 0, nullptr, x);
    case 2:
      return enqueue(turn_round<true, false>, 1, kThreads, 0, nullptr, x);
    case 3:
      return enqueue(barrier_in_a_branch, 1, kThreads, 0, nullptr, x);
    case 4:
      return enqueue(barrier_of_a_few, 1, kThreads, 0, nullptr, x);
    case 5:
      return enqueue(shuffle<kAll>, 1, kThreads, 0, nullptr, x, kThreads - 1);
    case 6:
      return enqueue(shuffle<0xffffu>, 1, kThreads, 0, nullptr, x, kThreads);
    case 7:
      return enqueue(one_too_many, count / kThreads + 1, kThreads, 0, nullptr, x, count);
    case 8:
      return enqueue(pack_at, 1, 1, 0, nullptr, x, 1);
    case 9:
      return enqueue(read_unwritten, 1, kThreads, kThreads * sizeof(float), nullptr, x);
    case 10:
      return enqueue(write_dynamic, 1, kThreads, (kThreads - 1) * sizeof(float), nullptr, x);
    case 11:
      return enqueue(all_to_one, 2, kThreads, 0, nullptr, x);
    case 12:
      return enqueue(index_past_array, 1, kThreads, 0, nullptr, x, kThreads);
    case 13:
      return enqueue(all_to_one, 1, 1025, 0, nullptr, x);
    case 14:
      return enqueue(all_to_one, dim3(1, 65536), 1, 0, nullptr, x);
    case 15:
      return enqueue(lanes_of_a_warp<false>, 1, kWarp, 0, nullptr, x);
    case 16:
      return enqueue(all_lanes_to_one, 1, kWarp, 0, nullptr, x);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace fusedops::cuda

// Runs fault number `fault` (0: none) on `count` numbers; what was found, or an empty text.
extern "C" [[gnu::visibility("default")]] const char* ptx_cuda_fault(int fault, float* x,
                                                                     int count) {
  const cudaError_t error = fusedops::cuda::run(fault, x, count);
  return error == cudaSuccess ? "" : ptx::finding().c_str();
}
