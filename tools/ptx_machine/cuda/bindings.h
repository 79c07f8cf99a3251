// What the bindings csrc/cuda/*.cpp read first: the kernels are registered for CPU tensors and in a
// namespace of their own, beside those of a library for GPUs.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(space, key, m)                                                 \
  static void fill_library(torch::Library&);                                              \
  static const torch::detail::TorchLibraryInit library_of_file(                           \
      torch::Library::IMPL, &fill_library, "fusedops_ptx_machine", c10::DispatchKey::CPU, \
      __FILE__, __LINE__);                                                                \
  void fill_library(torch::Library& m)
