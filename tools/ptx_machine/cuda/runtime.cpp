// Stands for CUDA's runtime library: what nvcc's code calls to register kernels, and launches,
// which the machine executes before they return. The kernels' PTX is in the objects that nvcc has
// written.
#include "runtime.h"

#include <cuda_runtime_api.h>

#include <deque>
#include <unordered_map>

namespace ptx {
namespace {

// The PTX of a file, by the GPU that it was compiled for (90: sm_90).
using Module = std::map<int, std::string>;

struct Kernel {
  const Module* module;
  std::string name;
  std::map<int, Program> programs;  // as Module, once they are parsed
};

struct Runtime {
  std::deque<Module> modules;
  std::unordered_map<const void*, Kernel> kernels;  // by the function that stands for it
  std::string finding;
  int capability = 90, multiprocessors = 1;
  uint64_t seed = 0;
};

// The objects of kernels register while the library is loaded.
Runtime& runtime() {
  static Runtime all;
  return all;
}

const Program& program_of(Kernel& kernel) {
  const int capability = runtime().capability;
  auto found = kernel.programs.find(capability);
  if (found == kernel.programs.end()) {
    auto program = parse(kernel.module->at(capability), kernel.name);
    found = kernel.programs.emplace(capability, std::move(program)).first;
  }
  return found->second;
}

// What the hardware requires of every kernel.
void check_limits(const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
      grid.z > 65535)
    throw Error("a grid of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " +
                std::to_string(grid.z) + ") blocks");
  if (config.dynamicSmemBytes > 48 * 1024)
    throw Error(std::to_string(config.dynamicSmemBytes) + " bytes of dynamic shared memory");
}

void execute(const cudaLaunchConfig_t& config, const void* function, void** arguments) {
  check_limits(config);
  Launch launch;
  launch.program = &program_of(runtime().kernels.at(function));
  const dim3 grid = config.gridDim, block = config.blockDim;
  launch.grid = {static_cast<int>(grid.x), static_cast<int>(grid.y), static_cast<int>(grid.z)};
  launch.block = {static_cast<int>(block.x), static_cast<int>(block.y), static_cast<int>(block.z)};
  launch.dynamic_shared = static_cast<int>(config.dynamicSmemBytes);
  launch.parameters.resize(launch.program->parameter_bytes);
  for (const auto& parameter : launch.program->parameters)
    std::memcpy(&launch.parameters[parameter.offset], *arguments++, parameter.bytes);
  launch.allocations = tensors();
  launch.seed = runtime().seed;
  run(launch);
}

}  // namespace

const std::string& finding() {
  return runtime().finding;
}

}  // namespace ptx

using ptx::runtime;

#define EXPORTED [[gnu::visibility("default")]]

extern "C" {

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  try {
    ptx::execute(*config, function, arguments);
    return cudaSuccess;
  } catch (const std::exception& error) {
    runtime().finding = error.what();
    return cudaErrorLaunchFailure;
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = runtime().multiprocessors;
  return cudaSuccess;
}

// Of a fat binary: its header, then a header and the text for every GPU.
void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const char* data;
  };
  struct Header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;  // behind the header
  };
  struct Entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t unused[3];
    uint32_t capability;
  };
  const char* at = static_cast<const Wrapper*>(wrapper)->data;
  const auto* header = reinterpret_cast<const Header*>(at);
  at += header->header_bytes;
  auto& module = runtime().modules.emplace_back();
  for (const char* end = at + header->bytes; at < end;) {
    const auto* entry = reinterpret_cast<const Entry*>(at);
    const char* text = at + entry->header_bytes;
    module[static_cast<int>(entry->capability)] = std::string(text, entry->bytes).c_str();
    at = text + entry->bytes;
  }
  return reinterpret_cast<void**>(&module);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** module, const char* function, char*, const char* name, int,
                            uint3*, uint3*, dim3*, dim3*, int*) {
  runtime().kernels[function] = {reinterpret_cast<ptx::Module*>(module), name, {}};
}

// What a kernel's function calls where <<<>>> launches it: csrc/cuda/launch.cuh does not.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

// Which GPU launches see from now on, and the order of their blocks and warps.
EXPORTED void ptx_cuda_configure(int capability, int multiprocessors, uint64_t seed) {
  runtime().capability = capability;
  runtime().multiprocessors = multiprocessors;
  runtime().seed = seed;
}

// Parses every kernel; returns how many there are, or 0 with the reason in `message`.
EXPORTED int ptx_cuda_parse_all(char* message, int size) {
  try {
    for (auto& [function, kernel] : runtime().kernels) ptx::program_of(kernel);
    return static_cast<int>(runtime().kernels.size());
  } catch (const std::exception& error) {
    std::snprintf(message, static_cast<size_t>(size), "%s", error.what());
    return 0;
  }
}
}
