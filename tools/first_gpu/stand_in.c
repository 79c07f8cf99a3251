/* Stands for libcuda.so.1 in the rehearsal: everything succeeds, and no kernel runs. An error that
   was planted by stand_in_plant comes as a GPU's does: with the launch that it is of only under
   CUDA_LAUNCH_BLOCKING=1, otherwise with the next call, and then with all calls that follow. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HANG = -1 };

static int planted = 0; /* of the next launch */
static int pending = 0; /* of a launch that nobody has waited for */
static unsigned long launches = 0;

static CUresult status(void) {
  while (pending == HANG) sleep(1);
  return (CUresult)pending;
}

void stand_in_plant(int error) { planted = error; }
unsigned long stand_in_launches(void) { return launches; }

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
          : error == CUDA_ERROR_ASSERT        ? "device-side assert triggered"
                                              : "unknown error";
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) { return status(); }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra) {
  CUresult before = status();
  const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
  if (before != CUDA_SUCCESS) return before;
  launches += 1;
  pending = planted;
  planted = 0;
  return blocking != NULL && strcmp(blocking, "1") == 0 ? status() : CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)1;
  return status();
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return status();
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 132;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return status();
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return cuCtxGetCurrent(context);
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **values,
                                CUdeviceptr pointer) {
  return CUDA_SUCCESS;
}
