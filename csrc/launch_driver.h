// The driver that launch plans run with: CUDA's, or a stand-in on machines without a GPU. No torch
// header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedops {

constexpr size_t kMapBytes = 128;  // of a CUtensorMap

// A launch, in the arguments of cuLaunchKernelEx.
struct KernelLaunch {
  uint64_t function;  // a CUfunction
  uint32_t grid[3];
  uint32_t threads;
  uint32_t shared;  // bytes
  void* stream;     // a CUstream
  void** parameters;
};

// The arguments of cuTensorMapEncodeTiled that differ between maps; the innermost dim comes first.
struct TensorMap {
  void* address;
  uint32_t dtype;  // a CUtensorMapDataType
  uint32_t rank;
  uint64_t sizes[5];
  uint64_t strides[5];  // bytes
  uint32_t box[5];
  uint32_t swizzle;
  uint32_t fill;  // a CUtensorMapFloatOOBfill
};

// What a plan asks a GPU's driver for. The functions return 0, or an error that `error` names.
struct LaunchDriver {
  void* (*stream)(int device);
  int (*launch)(const KernelLaunch* launch);
  int (*encode)(void* map, const TensorMap* arguments);
  const char* (*error)(int code);
};

}  // namespace fusedops
