// What the bindings csrc/cuda/*.cpp read first: the operators are registered for CPU tensors and in
// a namespace of their own, beside those of a library for GPUs.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#define FUSEDOPS_ON_HOST(kind, key, m)                                                        \
  static void fill_library(torch::Library&);                                                  \
  static const torch::detail::TorchLibraryInit library_of_file(                               \
      torch::Library::kind, &fill_library, "fusedops_cuda_on_host", key, __FILE__, __LINE__); \
  void fill_library(torch::Library& m)

#undef TORCH_LIBRARY
#define TORCH_LIBRARY(space, m) FUSEDOPS_ON_HOST(DEF, std::nullopt, m)
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(space, key, m) FUSEDOPS_ON_HOST(IMPL, c10::DispatchKey::CPU, m)
