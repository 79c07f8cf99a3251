// A libcuda.so.1 for machines without a GPU: modules load, launches are noted and run nothing.
//
// stand_in_driver.py compiles and loads it before Triton looks for the real one. Memory is the
// host's, so that addresses are those of CPU tensors. A launch is kept as bytes: function, grid,
// threads, shared memory, stream, and every parameter with the size that `stand_in_describe` gave,
// filled up to 8 bytes.
#include <cuda.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../csrc/launch_driver.h"

namespace {

std::mutex mutex;
std::map<uint64_t, std::vector<int>> parameter_sizes;  // by function
std::vector<std::string> launches;
uint64_t last_handle = 0x1000;
CUresult planned_failure = CUDA_SUCCESS;

template <typename Value>
void append(std::string& text, const Value& value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

CUresult note(uint64_t function, const uint32_t (&grid)[3], uint32_t threads, uint32_t shared,
              void* stream, void** parameters) {
  if (planned_failure != CUDA_SUCCESS) return planned_failure;
  const std::lock_guard lock(mutex);
  std::string text;
  append(text, function);
  append(text, grid);
  append(text, threads);
  append(text, shared);
  append(text, stream);
  text.resize((text.size() + 7) / 8 * 8, '\0');
  const auto& sizes = parameter_sizes.at(function);
  for (size_t i = 0; i < sizes.size(); ++i) {
    text.append(static_cast<const char*>(parameters[i]), static_cast<size_t>(sizes[i]));
    text.resize((text.size() + 7) / 8 * 8, '\0');
  }
  launches.push_back(text);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  return *version = CUDA_VERSION, CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return *device = ordinal, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return cuCtxGetCurrent(context);
}
CUresult cuCtxGetDevice(CUdevice* device) {
  return *device = 0, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  return *value = 0, CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  return *text = "an error of the stand-in", CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const bool shared = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
  return *value = shared ? 227 * 1024 : 132, CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  const std::lock_guard lock(mutex);
  return *module = reinterpret_cast<CUmodule>(last_handle += 16), CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char*) {
  return *function = reinterpret_cast<CUfunction>(module), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  const bool threads = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
  return *value = threads ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr) {
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  return std::memcpy(value, &pointer, sizeof pointer), CUDA_SUCCESS;
}

// The map holds its own arguments: equal maps were asked for in equal words.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  std::string text;
  append(text, address);
  append(text, static_cast<uint8_t>(dtype));
  append(text, static_cast<uint8_t>(rank));
  for (cuuint32_t dim = 0; dim < rank; ++dim) {
    append(text, sizes[dim]);
    // The stride of the outermost dim is not read.
    if (dim + 1 < rank) append(text, strides[dim]);
    append(text, static_cast<uint16_t>(box[dim]));
    append(text, static_cast<uint8_t>(steps[dim]));
  }
  append(text, static_cast<uint8_t>(interleave));
  append(text, static_cast<uint8_t>(swizzle));
  append(text, static_cast<uint8_t>(promotion));
  append(text, static_cast<uint8_t>(fill));
  if (text.size() > sizeof *map) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, text.data(), text.size());
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  return note(reinterpret_cast<uint64_t>(function),
              {config->gridDimX, config->gridDimY, config->gridDimZ}, config->blockDimX,
              config->sharedMemBytes, config->hStream, parameters);
}

void stand_in_describe(uint64_t function, int count, const int* sizes) {
  const std::lock_guard lock(mutex);
  parameter_sizes[function] = {sizes, sizes + count};
}
void stand_in_fail(int code) {
  planned_failure = static_cast<CUresult>(code);
}
int stand_in_launches() {
  return static_cast<int>(launches.size());
}
const char* stand_in_launch(int index, int* size) {
  *size = static_cast<int>(launches.at(index).size());
  return launches[index].data();
}
void stand_in_clear() {
  launches.clear();
}

// The functions of a LaunchDriver.
void* stand_in_stream(int) {
  return reinterpret_cast<void*>(0x5EED);
}
int stand_in_plan_launch(const fusedops::KernelLaunch* asked) {
  return note(asked->function, {asked->grid[0], asked->grid[1], asked->grid[2]}, asked->threads,
              asked->shared, asked->stream, asked->parameters);
}
int stand_in_encode(void* map, const fusedops::TensorMap* asked) {
  constexpr cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return cuTensorMapEncodeTiled(
      static_cast<CUtensorMap*>(map), static_cast<CUtensorMapDataType>(asked->dtype), asked->rank,
      asked->address, reinterpret_cast<const cuuint64_t*>(asked->sizes),
      reinterpret_cast<const cuuint64_t*>(asked->strides), asked->box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(asked->swizzle),
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, static_cast<CUtensorMapFloatOOBfill>(asked->fill));
}
const char* stand_in_error(int) {
  return "CUDA_ERROR_OF_THE_STAND_IN";
}

}  // extern "C"
