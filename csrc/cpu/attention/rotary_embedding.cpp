// Binding of rotary_embedding on the CPU: fusedops_cpp::rotary_embedding and its backward; see
// common/rotary_binding.h.
#include "rotary_embedding.h"

#include "../../common/rotary_binding.h"

namespace fusedops {
namespace {

DType type_of(const at::Tensor& tensor) {
  return dtype_of(tensor);
}

void run(const RotaryEmbedding& arguments, c10::Device /*device*/) {
  FUSEDOPS_CALL_ISA(rotary_embedding, arguments);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  RotaryOperators<RotaryEmbedding, RotaryHeads, type_of, run>::implement(m);
}

}  // namespace fusedops
