// What launch plans (csrc/launch_plan.h) ask CUDA's driver for. Its functions are looked up at the
// first use: the library is not linked against libcuda, which machines without a GPU lack.
#include <cuda.h>

#include <array>
#include <string>

#include <torch/library.h>

#include "../launch_driver.h"
#include "binding.h"

namespace fusedops::cuda {
namespace {

static_assert(sizeof(CUtensorMap) == kMapBytes);

template <typename Function>
Function driver_function(const char* name, unsigned int version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  C10_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &status));
  TORCH_CHECK(status == cudaDriverEntryPointSuccess, "the CUDA driver has no ", name,
              ": it is older than 12.0");
  return reinterpret_cast<Function>(found);
}

constexpr unsigned int kCuda12 = 12000;

void* stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

int launch(const KernelLaunch* asked) {
  static const auto function =
      driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx", kCuda12);
  CUlaunchConfig config{};
  config.gridDimX = asked->grid[0];
  config.gridDimY = asked->grid[1];
  config.gridDimZ = asked->grid[2];
  config.blockDimX = asked->threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = asked->shared;
  config.hStream = static_cast<CUstream>(asked->stream);
  const auto kernel = reinterpret_cast<CUfunction>(asked->function);
  auto result = function(&config, kernel, asked->parameters, nullptr);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not used CUDA before: the runtime makes its context current.
    C10_CUDA_CHECK(cudaFree(nullptr));
    result = function(&config, kernel, asked->parameters, nullptr);
  }
  return result;
}

int encode(void* map, const TensorMap* asked) {
  static const auto function =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", kCuda12);
  constexpr std::array<cuuint32_t, 5> steps{1, 1, 1, 1, 1};
  std::array<cuuint64_t, 5> sizes{}, strides{};
  std::array<cuuint32_t, 5> box{};
  std::copy_n(asked->sizes, sizes.size(), sizes.begin());
  std::copy_n(asked->strides, strides.size(), strides.begin());
  std::copy_n(asked->box, box.size(), box.begin());
  return function(
      static_cast<CUtensorMap*>(map), static_cast<CUtensorMapDataType>(asked->dtype), asked->rank,
      asked->address, sizes.data(), strides.data(), box.data(), steps.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(asked->swizzle),
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, static_cast<CUtensorMapFloatOOBfill>(asked->fill));
}

const char* error(int code) {
  static const auto function = driver_function<decltype(&cuGetErrorName)>("cuGetErrorName", 6000);
  const char* name = nullptr;
  return function(static_cast<CUresult>(code), &name) == CUDA_SUCCESS ? name : "unknown error";
}

}  // namespace
}  // namespace fusedops::cuda

TORCH_LIBRARY_FRAGMENT(fusedops_cuda, m) {
  // The addresses of the functions of a LaunchDriver, in its order.
  m.def("launch_driver() -> int[]", []() -> std::vector<int64_t> {
    using namespace fusedops::cuda;
    return {reinterpret_cast<int64_t>(&stream), reinterpret_cast<int64_t>(&launch),
            reinterpret_cast<int64_t>(&encode), reinterpret_cast<int64_t>(&error)};
  });
}
