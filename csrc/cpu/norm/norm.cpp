// Bindings of the norms on the CPU: fusedops_cpp::layer_norm, rms_norm, add_layer_norm,
// add_rms_norm and their backwards; see common/norm_binding.h.
#include "norm.h"

#include "../../common/norm_binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

struct Cpu {
  struct Guard {
    explicit Guard(at::Device) {}
  };
  static constexpr auto dropout_of = row_dropout_of;

  static std::array<int64_t, 3> partials(int64_t rows, int64_t columns, DType) {
    return {Chunks(rows).count, 2, columns};
  }

  static void forward(const NormForward& arguments) { FUSEDOPS_CALL_ISA(norm_forward, arguments); }

  static void backward(const NormBackward& arguments, bool /*adds*/) {
    FUSEDOPS_CALL_ISA(norm_backward, arguments);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  NormOperators<Cpu>::implement(m);
}

}  // namespace fusedops
