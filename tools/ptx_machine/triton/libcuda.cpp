// What Triton's launcher (C) calls of the CUDA driver: modules and launches go to Python, which has
// the PTX, and tensor maps are those of the machine. Built as libcuda.so.1 by ptx_machine/gpu.py.
#include <bit>
#include <cstdint>
#include <cstring>

#include "../tensor_map.h"
#include "cuda.h"

namespace {

using Load = uint64_t (*)();  // the handle of the module that is being loaded
using Launch = int (*)(uint64_t function, const unsigned* grid, unsigned threads, unsigned shared,
                       void* const* parameters);
Load load;
Launch launch;
int shared_memory;

using ptx::TensorMap;
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

// Called by Python before anything else.
void stand_in(Load new_load, Launch new_launch, int new_shared_memory) {
  load = new_load;
  launch = new_launch;
  shared_memory = new_shared_memory;
}

CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(load());
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char*) {
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  if (config->blockDimY != 1 || config->blockDimZ != 1) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config->numAttrs; ++i)  // clusters of blocks are not known
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      return CUDA_ERROR_NOT_SUPPORTED;
  return static_cast<CUresult>(launch(reinterpret_cast<uint64_t>(function), grid, config->blockDimX,
                                      config->sharedMemBytes, parameters));
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* shape, const cuuint64_t* strides,
                                const cuuint32_t* block, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const int bytes = bytes_of(type);
  TensorMap map = {};
  map.base = reinterpret_cast<uint64_t>(address);
  if (!bytes || rank < 1 || rank > 5 || map.base % 16 || interleave)
    return CUDA_ERROR_INVALID_VALUE;
  map.swizzle = static_cast<uint8_t>(swizzle);
  map.element_bytes = static_cast<uint8_t>(bytes);
  map.rank = static_cast<uint8_t>(rank);
  map.padding = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    const cuuint32_t from = rank - 1 - i;  // of the driver the innermost dimension is first
    const uint64_t stride = from ? strides[from - 1] : static_cast<uint64_t>(bytes);
    if (steps[from] != 1 || (from && stride % 16)) return CUDA_ERROR_INVALID_VALUE;
    map.block[i] = block[from];
    map.shape[i] = static_cast<uint32_t>(shape[from]);
    map.strides[i] = stride / static_cast<uint64_t>(bytes);
  }
  std::memset(to, 0, sizeof *to);
  std::memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}

// The memory of the host stands for that of the GPU.
CUresult cuPointerGetAttribute(void* to, CUpointer_attribute, CUdeviceptr pointer) {
  std::memcpy(to, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = shared_memory;  // Triton's loader asks for nothing else
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = 13020;  // Triton changes tensor maps for drivers of 13.1 and older
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "the PTX machine found an error";
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}

// Triton links these and calls none of them here.
CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuDeviceGet(CUdevice*, int) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuCtxGetLimit(size_t*, CUlimit) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuOccupancyMaxActiveClusters(int*, CUfunction, const CUlaunchConfig*) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const int*, const int*,
                                 cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
}
