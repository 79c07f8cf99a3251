// The table of contents of the CUDA library: a schema line per native CUDA kernel, each that of
// fusedops_cpp::X in csrc/schemas.cpp. It is apart because an op counts as having a CUDA kernel
// once its schema is defined, which must not happen where this library is not loaded. The operators
// are private and trust their caller, as those of fusedops_cpp do.
#include <torch/library.h>

TORCH_LIBRARY(fusedops_cuda, m) {
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
      " -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor? grad_output, Tensor input, Tensor? weight, Tensor mean,"
      " Tensor rstd, SymInt[] normalized_shape, float eps, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight,"
      " Tensor? bias, Tensor? seed, float eps, float dropout_p, ScalarType input_dtype)"
      " -> (Tensor normed, Tensor summed, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_backward(Tensor? grad_normed, Tensor? grad_summed, Tensor summed,"
      " Tensor? weight, Tensor mean, Tensor rstd, Tensor? seed, SymInt[] normalized_shape,"
      " float eps, float dropout_p, ScalarType input_dtype, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("gelu(Tensor input, str approximate) -> (Tensor output)");
  m.def(
      "gelu_backward(Tensor? grad_output, Tensor input, str approximate, bool[] output_mask)"
      " -> Tensor");
  m.def("bias_gelu(Tensor input, Tensor bias, str approximate) -> (Tensor output)");
  m.def(
      "bias_gelu_backward(Tensor? grad_output, Tensor input, Tensor bias, str approximate,"
      " bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "rotary_embedding(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved)"
      " -> (Tensor rotated_query, Tensor rotated_key)");
  m.def(
      "rotary_embedding_backward(Tensor? grad_rotated_query, Tensor? grad_rotated_key, Tensor cos,"
      " Tensor sin, bool interleaved, bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps,"
      " float weight_offset, str rounding) -> (Tensor output, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor? grad_output, Tensor input, Tensor? weight, Tensor rstd,"
      " SymInt[] normalized_shape, float eps, float weight_offset, str rounding,"
      " bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight,"
      " Tensor? seed, float eps, float weight_offset, str rounding, float dropout_p,"
      " ScalarType input_dtype) -> (Tensor normed, Tensor summed, Tensor rstd)");
  m.def(
      "add_rms_norm_backward(Tensor? grad_normed, Tensor? grad_summed, Tensor summed,"
      " Tensor? weight, Tensor rstd, Tensor? seed, SymInt[] normalized_shape, float eps,"
      " float weight_offset, str rounding, float dropout_p, ScalarType input_dtype,"
      " bool[] output_mask) -> (Tensor, Tensor, Tensor)");
}
