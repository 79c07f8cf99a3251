// What the bindings of linear_act and mlp share: matrix products of tensors of any strides.
#pragma once

#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"
#include "baddbmm.h"
#include "linear_act.h"

namespace fusedops {

// The tensor as a matrix [rows, features]: a view where memory allows it, else a dense copy.
inline at::Tensor as_rows(const at::Tensor& tensor) {
  const int64_t features = tensor.size(-1);
  if (tensor.dim() == 2) return tensor;
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.size(dim);
  return tensor.contiguous().view({rows, features});
}

// Whether a matrix is the transposed view of a dense one.
inline bool is_transposed(const at::Tensor& tensor) {
  return !tensor.is_contiguous() && tensor.t().is_contiguous();
}

inline Matrix matrix(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

inline Matrix transposed(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(1), tensor.stride(0)};
}

inline GemmCall product_of(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b,
                           const at::Tensor& like) {
  return {m, n, k, a, b, dtype_of(like)};
}

inline Activation parse_activation(std::string_view name) {
  const int index = find_activation(name);
  TORCH_CHECK_VALUE(index >= 0, "activation must be one of fusedops' activations, got ",
                    std::string(name));
  return static_cast<Activation>(index);
}

// output = act(x * weight^T + bias); `preactivation` and `output` may be undefined.
inline void linear_into(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        Activation activation, const at::Tensor& preactivation,
                        const at::Tensor& output) {
  const auto call =
      product_of(x.size(0), weight.size(0), x.size(1), matrix(x), transposed(weight), x);
  const LinearForward arguments{call, data(bias), mutable_data(preactivation), mutable_data(output),
                                activation};
  FUSEDOPS_CALL_ISA(linear_forward, arguments);
}

// output = alpha * batch1 * batch2 + beta * input, of as many dimensions each; `input` may be
// undefined, `output` is dense (baddbmm.cpp).
void batched_product_into(const at::Tensor& input, const at::Tensor& batch1,
                          const at::Tensor& batch2, double beta, double alpha,
                          const at::Tensor& output);

// The dense row-major product as a new tensor.
inline at::Tensor multiply(const GemmCall& call, const at::TensorOptions& options) {
  auto out = at::empty({call.m, call.n}, options);
  // Short sums go the way of a batch's products, without packing for all threads (above 256 float32
  // terms that is the faster one); not outer products, which read B in place (gemm.isa.cpp).
  const bool is_short = call.k > 4 && call.k * out.element_size() <= 1024;
  if (is_short && call.m > 1 && call.num_extra_products == 0) {
    const BatchedProduct arguments{call, {}, {}, {}, mutable_data(out), 1.0, 0.0};
    FUSEDOPS_CALL_ISA(batched_product, arguments);
    return out;
  }
  LinearForward arguments{call, nullptr, nullptr, mutable_data(out), Activation::identity};
  arguments.product.plain_output = mutable_data(out);
  FUSEDOPS_CALL_ISA(linear_forward, arguments);
  return out;
}

// The same of a * b; dimensions come from the strided operands.
inline at::Tensor multiply(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b,
                           const at::TensorOptions& options, const at::Tensor& like) {
  return multiply(product_of(m, n, k, a, b, like), options);
}

// grad * weight: the gradient of a linear layer's input. grad [rows, out], weight [out, in].
inline at::Tensor linear_grad_input(const at::Tensor& grad, const at::Tensor& weight) {
  return multiply(grad.size(0), weight.size(1), grad.size(1), matrix(grad), matrix(weight),
                  grad.options(), grad);
}

// grad^T * x [out, in], laid out in memory as `weight` is: a transposed weight (Conv1D) gets a
// transposed gradient, which its accumulation then need not copy.
inline at::Tensor linear_grad_weight(const at::Tensor& grad, const at::Tensor& x,
                                     const at::Tensor& weight) {
  const int64_t rows = grad.size(0), out = grad.size(1), in = x.size(1);
  if (is_transposed(weight)) {
    return multiply(in, out, rows, transposed(x), matrix(grad), grad.options(), grad).t();
  }
  return multiply(out, in, rows, transposed(grad), matrix(x), grad.options(), grad);
}

}  // namespace fusedops
