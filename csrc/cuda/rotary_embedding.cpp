// Binding of rotary_embedding on CUDA: fusedops_cuda::rotary_embedding and its backward; see
// common/rotary_binding.h.
#include "rotary_embedding.h"

#include "../common/rotary_binding.h"
#include "binding.h"

namespace fusedops::cuda {
namespace {

void run(const RotaryEmbedding& arguments, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(rotary_embedding(arguments, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cuda, CUDA, m) {
  RotaryOperators<RotaryEmbedding, RotaryHeads, type_of, run>::implement(m);
}

}  // namespace fusedops::cuda
