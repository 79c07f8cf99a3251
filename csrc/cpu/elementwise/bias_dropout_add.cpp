// Binding of bias_dropout_add on the CPU: fusedops_cpp::bias_dropout_add and its backward.
// Arguments were checked by fusedops/ops/bias_dropout_add.py.
#include "bias_dropout_add.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// Elements without a bias have no rows of their own: they are cut as suits the loop. Those that
// stand elsewhere in a larger tensor have: a row lies in one run.
int64_t columns_of(const at::Tensor& tensor, bool has_bias, const Dropout& dropout) {
  if (has_bias || dropout.places.numbers != nullptr) return tensor.dim() > 0 ? tensor.size(-1) : 1;
  for (const int64_t columns : {4096, 1024, 256, 64}) {
    if (tensor.numel() % columns == 0) return columns;
  }
  return tensor.dim() > 0 ? tensor.size(-1) : 1;
}

at::Tensor forward(const at::Tensor& input, const Optional& bias, const at::Tensor& residual,
                   const Optional& seed, double p, at::ScalarType) {
  const auto x = input.contiguous();
  const auto r = residual.contiguous();
  const auto b = dense(bias);
  auto output = at::empty(r.sizes(), r.options());
  if (r.numel() > 0) {
    const auto numbers = dense(seed);
    const auto dropout = row_dropout_of(numbers, p);
    const int64_t columns = columns_of(r, b.defined(), dropout);
    const BiasDropoutAddForward arguments{
        data(x), data(b), data(r),     mutable_data(output),          r.numel() / columns,
        columns, dropout, dtype_of(x), dtype_of(b.defined() ? b : x), dtype_of(r)};
    FUSEDOPS_CALL_ISA(bias_dropout_add_forward, arguments);
  }
  return output;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const Optional& grad_output,
                                                        const Optional& bias, const Optional& seed,
                                                        double p, at::ScalarType input_dtype,
                                                        c10::List<bool> output_mask) {
  const auto dy = grad_output->contiguous();
  const auto numbers = dense(seed);
  const auto dropout = row_dropout_of(numbers, p);
  at::Tensor dx, dbias, partials;
  // Otherwise the gradient of input is grad_output itself (Gradient.aliases).
  const bool differs = dropout.active() || input_dtype != dy.scalar_type();
  if (output_mask[0] && differs) dx = at::empty(dy.sizes(), dy.options().dtype(input_dtype));
  if (output_mask[1]) dbias = at::empty(bias->sizes(), bias->options());
  if (dy.numel() == 0) {
    if (dbias.defined()) dbias.zero_();
    return {dx, dbias, at::Tensor()};
  }
  if (!dx.defined() && !dbias.defined()) return {};
  const int64_t columns = columns_of(dy, dbias.defined(), dropout);
  const int64_t rows = dy.numel() / columns;
  if (dbias.defined()) {
    partials = at::empty({Chunks(rows).count, columns}, dy.options().dtype(statistics_type(dy)));
  }
  const BiasDropoutAddBackward arguments{data(dy),
                                         mutable_data(dx),
                                         mutable_data(dbias),
                                         mutable_data(partials),
                                         rows,
                                         columns,
                                         dropout,
                                         dtype_of(input_dtype),
                                         dbias.defined() ? dtype_of(dbias) : dtype_of(dy),
                                         dtype_of(dy)};
  FUSEDOPS_CALL_ISA(bias_dropout_add_backward, arguments);
  return {dx, dbias, at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("bias_dropout_add", forward);
  m.impl("bias_dropout_add_backward", backward);
}

}  // namespace fusedops
