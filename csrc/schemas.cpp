// The table of contents: one schema line per native kernel. Schemas are those of the fusedops::X
// ops (fusedops/ops/X.py) and of the X_backward ops that define_op derives from them.
#include <torch/library.h>

TORCH_LIBRARY(fusedops_cpp, m) {
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
      " -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor? grad_output, Tensor input, Tensor? weight, Tensor mean,"
      " Tensor rstd, SymInt[] normalized_shape, float eps, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor)");
  m.def("gelu(Tensor input, str approximate) -> (Tensor output)");
  m.def(
      "gelu_backward(Tensor? grad_output, Tensor input, str approximate, bool[] output_mask)"
      " -> Tensor");
  m.def("bias_gelu(Tensor input, Tensor bias, str approximate) -> (Tensor output)");
  m.def(
      "bias_gelu_backward(Tensor? grad_output, Tensor input, Tensor bias, str approximate,"
      " bool[] output_mask) -> (Tensor, Tensor)");
}
