// Binding of add_layer_norm on the CPU: fusedops_cpp::add_layer_norm and its backward.
// Arguments were checked by fusedops/ops/add_layer_norm.py.
#include "add_layer_norm.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../common/binding.h"
#include "../common/parallel.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Tensors4 forward(const at::Tensor& input, const at::Tensor& residual,
                 at::IntArrayRef normalized_shape, const Optional& weight, const Optional& bias,
                 const Optional& seed, double eps, double dropout_p, at::ScalarType) {
  const auto x = input.contiguous();
  const auto r = residual.contiguous();
  auto w = dense(weight);
  auto b = dense(bias);
  const auto leading = r.sizes().slice(0, r.dim() - normalized_shape.size());
  const auto statistics = r.options().dtype(statistics_type(r));
  auto normed = at::empty(r.sizes(), r.options());
  auto summed = at::empty(r.sizes(), r.options());
  auto mean = at::empty(leading, statistics);
  auto rstd = at::empty(leading, statistics);
  const auto parameter_dtype = align_parameters(r, w, b);
  const int64_t rows = mean.numel();
  if (r.numel() > 0) {
    const AddLayerNormForward arguments{data(x),
                                        data(r),
                                        data(w),
                                        data(b),
                                        mutable_data(normed),
                                        mutable_data(summed),
                                        mutable_data(mean),
                                        mutable_data(rstd),
                                        rows,
                                        r.numel() / rows,
                                        eps,
                                        dropout_of(seed, dropout_p),
                                        dtype_of(x),
                                        dtype_of(r),
                                        parameter_dtype};
    FUSEDOPS_CALL_ISA(add_layer_norm_forward, arguments);
  }
  return {normed, summed, mean, rstd};
}

Tensors4 backward(const Optional& grad_normed, const Optional& grad_summed,
                  const at::Tensor& summed, const Optional& weight, const at::Tensor& mean,
                  const at::Tensor& rstd, const Optional& seed, at::IntArrayRef normalized_shape,
                  double eps, double dropout_p, at::ScalarType input_dtype,
                  c10::List<bool> output_mask) {
  const auto x = summed.contiguous();
  const auto dy = dense(grad_normed);
  const auto ds = dense(grad_summed);
  auto w = dense(weight);
  at::Tensor no_bias;
  const auto parameter_dtype = align_parameters(x, w, no_bias);
  const auto dropout = dropout_of(seed, dropout_p);
  const auto parameter_options = x.options().dtype(w.defined() ? w.scalar_type() : x.scalar_type());
  at::Tensor dx, dr, dweight, dbias, partials;
  // Otherwise the gradient of input is that of residual: see Gradient.same.
  const bool differs = !output_mask[1] || dropout.active() || input_dtype != x.scalar_type();
  if (output_mask[0] && differs) {
    dx = at::empty(x.sizes(), x.options().dtype(kernel_type(input_dtype, x)));
  }
  if (output_mask[1]) dr = at::empty(x.sizes(), x.options());
  if (output_mask[2] && dy.defined()) dweight = at::empty(normalized_shape, parameter_options);
  if (output_mask[3] && dy.defined()) dbias = at::empty(normalized_shape, parameter_options);
  if (x.numel() == 0) {
    if (dweight.defined()) dweight.zero_();
    if (dbias.defined()) dbias.zero_();
    return {dx.defined() ? dx.to(input_dtype) : dx, dr, dweight, dbias};
  }
  const int64_t rows = mean.numel();
  const int64_t columns = x.numel() / rows;
  if (dweight.defined() || dbias.defined()) {
    partials = at::empty({Chunks(rows).count, 2, columns}, x.options().dtype(statistics_type(x)));
  }
  const auto mean_dense = mean.contiguous();
  const auto rstd_dense = rstd.contiguous();
  const AddLayerNormBackward arguments{
      {data(dy), data(x), data(w), data(mean_dense), data(rstd_dense), nullptr,
       mutable_data(dweight), mutable_data(dbias), mutable_data(partials), rows, columns,
       dtype_of(x), parameter_dtype},
      data(ds),
      mutable_data(dx),
      mutable_data(dr),
      dropout,
      dx.defined() ? dtype_of(dx) : dtype_of(x)};
  FUSEDOPS_CALL_ISA(add_layer_norm_backward, arguments);
  return {dx.defined() ? dx.to(input_dtype) : dx, dr, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("add_layer_norm", forward);
  m.impl("add_layer_norm_backward", backward);
}

}  // namespace fusedops
