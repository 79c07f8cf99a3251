// Bindings of the norms on CUDA: fusedops_cuda::layer_norm, rms_norm, add_layer_norm, add_rms_norm
// and their backwards; see common/norm_binding.h.
#include "norm.h"

#include <cmath>

#include "../common/norm_binding.h"
#include "binding.h"

namespace fusedops::cuda {
namespace {

// `seed` is dense; it must outlive the launch.
DropoutArguments dropout_arguments(const at::Tensor& seed, double p) {
  const auto threshold = static_cast<uint64_t>(std::nearbyint(p * 4294967296.0));
  const bool drawn = threshold != 0 && threshold >> 32 == 0;
  TORCH_INTERNAL_ASSERT(!drawn || seed.defined());
  return {.seed = drawn ? seed.const_data_ptr<int64_t>() : nullptr,
          .placed = drawn && seed.numel() > 2,
          .threshold = threshold,
          .scale = p < 1.0 ? 1.0 / (1.0 - p) : 1.0};
}

struct Cuda {
  using Guard = c10::cuda::CUDAGuard;
  static constexpr auto dropout_of = dropout_arguments;

  static std::array<int64_t, 3> partials(int64_t rows, int64_t columns, DType type) {
    return {2, partial_rows(rows, columns, type), columns};
  }

  static void forward(const NormForward& arguments) {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(arguments.residual != nullptr ? add_norm_forward(arguments, stream)
                                                 : norm_forward(arguments, stream));
  }

  static void backward(const NormBackward& arguments, bool adds) {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(adds ? add_norm_backward(arguments, stream) : norm_backward(arguments, stream));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  NormOperators<Cuda>::implement(m);
}

}  // namespace fusedops::cuda
